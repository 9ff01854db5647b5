# SPDX-License-Identifier: Apache-2.0
"""RunConfig: what a recipe file may say. Every key is declared once: type, bound, default, meaning.

The check of a recipe, the error messages and ``configs/README.md`` are derived from these declarations.
Rules that need a model's shapes belong to the plan; the rules here hold for any model. A value that follows
from other keys is a property, so a config cannot hold two answers to one question.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from executor.config_errors import first_error, show
from executor.config_parallel import ParallelSection
from executor.config_section import LARGEST, Section, TextList, key
from executor.config_source import apply_overrides, read_mapping
from executor.errors import UserError

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]


def _platform_name(value: object) -> object:
    """YAML reads an unquoted 950 as an integer, but the platform is a name."""
    return "950" if type(value) is int and value == 950 else value


Platform = Annotated[Literal["auto", "cpu", "a2", "a3", "950"], BeforeValidator(_platform_name)]


def _holds_nul(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_nul(item) for item in (*value.keys(), *value.values()))
    return any(map(_holds_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def _from_root(path: str) -> Path:
    return REPOSITORY_ROOT / os.path.expanduser(path)  # leaves the home of an unknown user alone


class RopeScaling(Section):
    """YaRN, for contexts beyond the trained one. Replaces the scaling of config.json; no file is edited."""

    rope_type: Literal["default", "yarn"] = key("yarn", "default: no scaling.")
    factor: float | None = key(None, "Extended context divided by the original one; yarn needs it.", ge=1, le=10000)
    original_max_position_embeddings: int | None = key(
        None, "Context of the training (Qwen3: 32768); null: the model's max_position_embeddings.", ge=1
    )
    attention_factor: float | None = key(None, "Scale of cos and sin; null: 0.1 ln(factor) + 1.", gt=0)
    beta_fast: float | None = key(
        None, "Frequencies with more turns than this in the original context are kept; null: 32.", gt=0
    )
    beta_slow: float | None = key(None, "Those with fewer are divided by factor; null: 1.", gt=0)

    def as_dict(self) -> dict[str, Any]:
        """The keys that hold a value, spelled like a ``rope_scaling`` entry of config.json."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _yarn_has_factor(self) -> Self:
        if self.rope_type == "yarn" and self.factor is None:
            key = "model_config.rope_scaling"
            raise UserError(f"missing key `{key}.factor`: {key}.rope_type=yarn needs a number >= 1")
        return self


class ModelSection(Section):
    """Which model, in which number format, on which machine, executed how."""

    model_name: str = key(
        ..., "Name of the case; without model_path, also of the shapes in assets/model_configs.", min_length=1
    )
    model_path: str | None = key(
        None, "Directory with config.json, weights and tokenizer; null: the shipped shapes.", min_length=1
    )
    with_ckpt: bool = key(True, "Load the weights; false: random weights, for timing.")
    exe_mode: Literal["eager", "inductor", "ge_graph", "npugraph_ex"] = key("eager", "How a decode step is executed.")
    dtype: Literal["bfloat16", "float16", "float32", "float64", "auto"] = key(
        "bfloat16", "Type of weights and activations; auto: the checkpoint's; float32, float64: CPU only."
    )
    platform_version: Platform = key("auto", "Machine to plan for; auto: the machine this runs on.")
    enable_profiler: bool = key(False, "Record a profile of the run.")
    enable_cache_compile: bool = key(False, "Keep compiled graphs on disk and reuse them.")
    compile_cache_dir: str = key("compile_cache", "Directory for them.", min_length=1)
    compile_cache_gib: float = key(10.0, "GiB that they may take; the least recently used are removed.", ge=0)
    unfused: TextList = key((), "Fused operators to replace by plain ones, to find a wrong kernel.")
    shipped_converters: bool = key(False, "Lower with torchair's own converters only: more copies, plain gating.")
    enable_weight_nz: bool = key(False, "Store matmul weights in the NPU's fractal NZ format.")
    force_eplb: bool = key(False, "Deal tokens evenly to the experts instead of routing them, for timing.")
    enable_thinking: bool = key(True, "Let the chat template ask for a reasoning block before the answer.")
    rope_scaling: RopeScaling | None = key(None, "Context extension; null: what config.json says.")
    max_position_embeddings: int | None = key(None, "Context length; null: what config.json says.", ge=1, le=LARGEST)

    @property
    def config_dir(self) -> Path:
        """Where config.json should be: ``model_path``, else the shipped shapes. Existence is not checked."""
        return _from_root(self.model_path or f"assets/model_configs/{self.model_name}")

    @model_validator(mode="after")
    def _name_is_one_path_component(self) -> Self:
        """The name becomes a directory of results and of compiled graphs, which must not lead elsewhere."""
        if self.model_name in (".", "..") or set(self.model_name) & set("/\\\0"):
            raise UserError(
                f"model_config.model_name={show(self.model_name)} must be a directory name, "
                "without slashes; a location belongs in model_config.model_path"
            )
        return self

    @model_validator(mode="after")
    def _dtype_runs_on_platform(self) -> Self:
        """float32 and float64 are accepted by the CPU reference kernels alone."""
        if self.dtype in ("float32", "float64") and self.platform_version not in ("auto", "cpu"):
            raise UserError(
                f"model_config.dtype={self.dtype} runs on a CPU only, not on model_config.platform_version="
                f"{self.platform_version}; use dtype bfloat16 or float16"
            )
        return self


class DataSection(Section):
    """The prompts and how they become tokens."""

    dataset: str | None = key(None, "Prompts: .txt with one per line, or .jsonl; null: none.", min_length=1)
    input_truncated_len: int | None = key(
        None, "Longer prompts (with template) keep their last n tokens; null: all.", ge=1
    )
    chat_template: bool = key(True, "Wrap each prompt in the tokenizer's chat template.")
    system_prompt: str | None = key(None, "System message put before each prompt; null: none.")

    @property
    def dataset_path(self) -> Path | None:
        """``dataset`` as an absolute path."""
        return None if self.dataset is None else _from_root(self.dataset)


class SchedulerSection(Section):
    """How much is in flight, and the paged KV cache. batch_size is a multiple of attn_dp_size."""

    batch_size: int = key(1, "Sequences decoded together, over all ranks.", ge=1, le=LARGEST)
    max_new_tokens: int = key(256, "Longest answer, in tokens.", ge=1, le=LARGEST)
    max_prefill_tokens: int = key(4096, "Most prompt tokens processed in one prefill step.", ge=1, le=LARGEST)
    max_seq_len: int | None = key(None, "Longest prompt plus answer; null: the model's context.", ge=2, le=LARGEST)
    block_size: int = key(128, "Tokens per KV cache block.", ge=16, le=1024, multiple_of=16)
    decode_buckets: int = key(
        8, "Most numbers of rows (graphs) a decode step may have; between them it is padded.", ge=1, le=1024
    )
    mem_fraction_static: float = key(0.9, "Share of device memory for all that the plan counts.", gt=0, le=1)
    num_blocks: int | None = key(
        None, "KV cache blocks per rank; null: enough for the batch, or what fits.", ge=1, le=LARGEST
    )

    @model_validator(mode="after")
    def _answer_fits_sequence(self) -> Self:
        if self.max_seq_len is not None and self.max_new_tokens >= self.max_seq_len:
            raise UserError(
                f"scheduler_config.max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"scheduler_config.max_seq_len={self.max_seq_len}; max_seq_len counts prompt and answer"
            )
        return self


class SamplingSection(Section):
    """How the next token is chosen. null: what the checkpoint's generation_config.json says."""

    do_sample: bool | None = key(None, "false: greedy, the most likely token.")
    temperature: float | None = key(
        None, "Divides the logits, at least 1e-4; set > 0, it turns sampling on; 0: greedy.", ge=0
    )
    top_k: int | None = key(None, "Keep the k most likely tokens; 0: all.", ge=0)
    top_p: float | None = key(None, "Keep the most likely tokens up to this total probability.", gt=0, le=1)
    min_p: float | None = key(None, "Keep tokens at least this likely relative to the best one.", ge=0, le=1)
    repetition_penalty: float | None = key(None, "Above 1 disfavours tokens already present.", ge=1e-3, le=1e3)
    seed: int | None = key(None, "Seed of the random draws; null: a run cannot be repeated.", ge=0, lt=2**63)
    ignore_eos: bool = key(False, "Go on after an end token, for timing.")
    stop: TextList = key((), "Texts that end an answer; they are not part of it.")


class OutputSection(Section):
    """What the run leaves behind."""

    dir: str = key("output", "Directory for results and profiles.", min_length=1)

    @property
    def path(self) -> Path:
        """``dir`` as an absolute path."""
        return _from_root(self.dir)


class RunConfig(Section):
    """One run: the sections of a recipe file. Only model_config.model_name has no default."""

    model: ModelSection = Field(alias="model_config", description=ModelSection.__doc__)
    data: DataSection = Field(DataSection(), alias="data_config", description=DataSection.__doc__)
    parallel: ParallelSection = Field(ParallelSection(), alias="parallel_config", description=ParallelSection.__doc__)
    scheduler: SchedulerSection = Field(
        SchedulerSection(), alias="scheduler_config", description=SchedulerSection.__doc__
    )
    sampling: SamplingSection = Field(SamplingSection(), alias="sampling_config", description=SamplingSection.__doc__)
    output: OutputSection = Field(OutputSection(), alias="output_config", description=OutputSection.__doc__)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML file, apply ``section.key=value`` overrides in order, and check the result.

        Raises UserError, one line, when the file cannot be read as a mapping, an override is malformed, or
        the result breaks a constraint.
        """
        return cls.from_mapping(apply_overrides(read_mapping(path), overrides))

    @classmethod
    def from_mapping(cls, mapping: Mapping[Any, Any]) -> Self:
        """Check plain data spelled like a recipe file. Raises UserError, one line."""
        try:
            config = cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise UserError(first_error(error, cls)) from None
        if _holds_nul(config.to_mapping()):
            raise UserError("the recipe holds a NUL character, which no name or path may have; remove it")
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Every key with its value, as plain data spelled like a recipe file; ``from_mapping`` undoes it."""
        return self.model_dump(mode="json", by_alias=True)

    @model_validator(mode="after")
    def _batch_splits_over_data_parallel_groups(self) -> Self:
        batch, split = self.scheduler.batch_size, self.parallel
        if batch % split.attn_dp_size:
            raise UserError(
                f"scheduler_config.batch_size={batch} must be a multiple of attn_dp_size={split.attn_dp_size}"
                f" (parallel_config.world_size={split.world_size} / attn_tp_size={split.attn_tp_size})"
            )
        return self
