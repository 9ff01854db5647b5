# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's ``config.json`` says about the model, frozen and in one spelling.

transformers' own config classes do the reading, so that defaults of absent keys and the two spellings of rope
settings (``rope_scaling`` of 4.x, ``rope_parameters`` of 5.x) mean here what they mean there. What we do not
implement is refused here, by name.
"""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.errors import UserError

ROPE_TYPES = ("default", "yarn")
ROPE_KEYS = ("rope_scaling", "rope_parameters")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings. The YaRN fields follow the paper (arXiv 2309.00071) and HF's key names."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool

    def __post_init__(self) -> None:
        for key, least in (("num_experts", 0), ("moe_intermediate_size", 1)):
            if getattr(self, key) < least:
                raise UserError(f"config.json: {key}={getattr(self, key)} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one model; names are Hugging Face's."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None = None
    moe_layers: tuple[int, ...] = ()

    @property
    def context_length(self) -> int:
        """Longest sequence (prompt + answer), in tokens: YaRN stretches the length it was trained for."""
        if self.rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.factor * self.rope.original_max_position_embeddings))
        return self.max_position_embeddings


def read_config_json(path: Path) -> dict[str, Any]:
    """The raw ``config.json``. Raises UserError if it is missing, not UTF-8 JSON, or not an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; a model directory holds config.json, the safetensors shards and the tokenizer"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); it must be a readable file") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, thousands of digits or of brackets
        raise UserError(f"{path}: not JSON ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(raw).__name__}; download it again")
    return raw


def with_overrides(
    raw: dict[str, Any], rope_scaling: dict[str, Any] | None, max_position_embeddings: int | None
) -> dict[str, Any]:
    """``raw`` with the run's own rope settings and context length, so that nobody edits a checkpoint for YaRN."""
    raw = dict(raw)
    if rope_scaling is not None:
        theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta")
        raw.pop("rope_scaling", None)
        raw["rope_parameters"] = {**({"rope_theta": theta} if theta else {}), **rope_scaling}
    if max_position_embeddings is not None:
        raw["max_position_embeddings"] = max_position_embeddings
    return raw


def _check_rope(key: str, section: object) -> None:
    """``section`` is the value of ``key``, either spelling of rope settings."""
    if not isinstance(section, dict):
        raise UserError(f"config.json: {key}={section!r} must be an object with rope_type, or null")
    spelling = "rope_type" if "rope_type" in section else "type"
    kind = section.get(spelling, "default")
    if kind not in ROPE_TYPES:
        raise UserError(f"config.json: {key}.{spelling}={kind!r} is not supported; one of {', '.join(ROPE_TYPES)}")
    for name, value in section.items():
        known = name in RopeConfig.__dataclass_fields__ and name not in ("rope_type", "truncate")
        if known and value is not None and not _is_positive(value):
            raise UserError(f"config.json: {key}.{name}={value!r} must be a positive number")
    if section.get("partial_rotary_factor") not in (None, 1):
        raise UserError(f"config.json: {key}.partial_rotary_factor is not supported; Qwen3 rotates whole heads")
    if kind == "yarn" and (section.get("factor") or 0) < 1:
        raise UserError(
            f"config.json: {key}.factor={section.get('factor')} must be a number >= 1, the extended context divided "
            "by the original one, as rope type yarn needs it"
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_sizes(hf: Any) -> None:
    """transformers' check lets zero and negative sizes through."""
    for key in (*REQUIRED, "num_key_value_heads", "max_position_embeddings"):
        value = getattr(hf, key)
        if not (isinstance(value, int) and 1 <= value < 2**31):
            raise UserError(f"config.json: {key}={value!r} must be an integer >= 1 (and below 2^31)")
    head_dim = getattr(hf, "head_dim", None)
    if head_dim is not None and not (isinstance(head_dim, int) and 2 <= head_dim <= 65536 and head_dim % 2 == 0):
        raise UserError(f"config.json: head_dim={head_dim!r} must be an even integer >= 2: rope turns pairs")
    if not _is_positive(hf.rms_norm_eps):
        raise UserError(f"config.json: rms_norm_eps={hf.rms_norm_eps!r} must be a positive number")
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}, so that query "
            "heads can share them evenly"
        )


def _read(raw: dict[str, Any], config_class: type) -> Any:
    """``config_class`` of ``raw``. Its log is silenced: what it warns of is refused here or, like a context other
    than factor times the original one, what Qwen3's model cards prescribe."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    fields = copy.deepcopy({k: v for k, v in raw.items() if k not in ("architectures", "transformers_version")})
    try:
        return config_class(**fields)  # the copy, because it writes into the rope settings it is given
    except Exception as error:  # transformers raises many kinds here; all of them mean the file is wrong
        raise UserError(f"config.json: {' '.join(str(error).split())}") from None
    finally:
        logging.set_verbosity(level)


def parse_shared_fields(raw: dict[str, Any], config_class: type) -> tuple[Any, dict[str, Any]]:
    """Read ``raw`` with transformers' ``config_class``.

    Returns:
        the transformers config object, and the keyword arguments of ModelConfig that dense and MoE models share.
    Raises:
        UserError: a required key is missing, a value has the wrong type, or a feature is not supported.
    """
    for key in REQUIRED:
        if key not in raw:
            raise UserError(f"config.json: missing key {key}; use the config.json that came with the weights")
    if raw.get("use_sliding_window"):
        raise UserError("config.json: use_sliding_window=true is not supported; Qwen3 was released without it")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act={raw['hidden_act']!r} is not supported; only silu")
    if raw.get("quantization_config"):
        section = raw["quantization_config"]
        method = section.get("quant_method") if isinstance(section, dict) else section
        raise UserError(f"config.json: quantization_config ({method}) is not supported yet; use a BF16 checkpoint")
    for key in ROPE_KEYS:
        if raw.get(key) is not None:
            _check_rope(key, raw[key])
    if raw.get("rope_theta") is not None and not _is_positive(raw["rope_theta"]):
        raise UserError(f"config.json: rope_theta={raw['rope_theta']!r} must be a positive number")
    hf = _read(raw, config_class)
    _check_sizes(hf)
    rope = {k: v for k, v in hf.rope_parameters.items() if k in RopeConfig.__dataclass_fields__ and v is not None}
    eos = hf.eos_token_id
    return hf, dict(
        model_type=raw["model_type"],
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_hidden_layers=hf.num_hidden_layers,
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        attention_bias=hf.attention_bias,
        tie_word_embeddings=hf.tie_word_embeddings,
        max_position_embeddings=hf.max_position_embeddings,
        rope=RopeConfig(**rope),
        dtype=str(hf.dtype).removeprefix("torch.") if hf.dtype is not None else None,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )
