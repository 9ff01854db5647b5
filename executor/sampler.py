# SPDX-License-Identifier: Apache-2.0
"""From logits to one token id per sequence; a draw depends on its own row and generator, on nothing else.

The filters and their order are those of ``transformers`` (repetition penalty, temperature, top-k, top-p,
min-p), so that a recipe samples from the distribution its model card describes. A sampled token takes
exactly one random number, and rows are treated one by one: a seeded request yields the same tokens alone, in
any batch position, and beside any neighbours.

Shapes: B sequences, V columns of the logits, K tokens under consideration in one row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.errors import UserError

# What ``transformers`` 5.24 fills in for a key that generation_config.json does not have
# (``GenerationConfig._get_default_generation_params``; min_p has none there); mind the top_k of 50.
_ABSENT = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

# key -> (type, condition, the condition in words)
_RULES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda x: x == 0 or 1e-4 <= x <= 1e4, "0, which means greedy, or a number in [1e-4, 1e4]"),
    "top_k": (int, lambda x: x >= 0, "an integer >= 0, where 0 means off"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number in (0, 1], where 1 means off"),
    "min_p": (float, lambda x: 0 <= x <= 1, "a number in [0, 1], where 0 means off"),
    "repetition_penalty": (float, lambda x: 1e-3 <= x <= 1e3, "a number in [1e-3, 1e3], where 1 means off"),
    "seed": (int, lambda x: 0 <= x < 2**63, "an integer in [0, 2**63)"),
    "do_sample": (bool, lambda x: True, "true or false"),
}


def _check(prefix: str, key: str, value: object) -> None:
    """Raise ``UserError`` in the user's words unless ``value`` obeys the rule of ``key``."""
    kind, holds, words = _RULES[key]
    right_type = isinstance(value, bool) == (kind is bool)  # Python takes True for an int
    if isinstance(value, (int, float) if kind is float else kind) and right_type and holds(value):
        return
    raise UserError(f"{prefix}{key}={value!r}: must be {words}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens: ``temperature`` 0 is greedy, other defaults switch a filter off.

    Raises:
        UserError: a value is out of range or of the wrong type (one line, with the dotted key).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for key in _ABSENT:
            _check("sampling_config.", key, getattr(self, key))
        if self.seed is not None:
            _check("sampling_config.", "seed", self.seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def resolve(cls, generation_config: Mapping[str, object], overrides: Mapping[str, object]) -> "SamplingParams":
        """Merge what the model recommends with what the user asked for.

        Args:
            generation_config: content of generation_config.json (``{}`` if there is none).
            overrides: the ``sampling_config`` section; ``None`` means not given. Keys that do not shape the
                distribution (``stop``, ``ignore_eos``) may be present and are left alone.

        The rules are those of ``transformers`` 5.24: ``do_sample`` false or absent means greedy, a greedy
        request keeps only its repetition penalty, and a key that is in neither place takes the library's
        default, which for ``top_k`` is 50, not off. Two rules are ours: an override of ``temperature``
        without one of ``do_sample`` decides between greedy (0) and sampling (> 0), and an override
        ``do_sample=false`` is greedy whatever the temperature.

        Raises:
            UserError: a bad value from either source, or ``do_sample=true`` with temperature 0.
        """
        asked = {key: value for key, value in overrides.items() if key in _RULES and value is not None}
        recommended = {key: generation_config.get(key) for key in (*_ABSENT, "do_sample")}
        recommended = {key: value for key, value in recommended.items() if value is not None}
        for prefix, given in (("generation_config.json: ", recommended), ("sampling_config.", asked)):
            for key, value in given.items():
                _check(prefix, key, value)
        merged: dict = {**_ABSENT, "do_sample": False, "seed": None, **recommended, **asked}
        do_sample = merged.pop("do_sample")
        if "temperature" in asked and "do_sample" not in asked:
            do_sample = merged["temperature"] > 0
        if do_sample and merged["temperature"] > 0:
            return cls(**merged)
        if asked.get("do_sample"):
            raise UserError(
                "sampling_config.do_sample=true with temperature 0, which means greedy: "
                "set sampling_config.temperature > 0 or drop do_sample"
            )
        return cls(repetition_penalty=merged["repetition_penalty"], seed=merged["seed"])

    def generator(self) -> torch.Generator | None:
        """A fresh CPU generator for one request: ``None`` if greedy, unpredictable if there is no seed."""
        if self.greedy:
            return None
        generator = torch.Generator()
        return generator.manual_seed(generator.seed() if self.seed is None else self.seed)


def warn_if_greedy_thinking(params: SamplingParams, enable_thinking: bool) -> str | None:
    """One line of advice for greedy thinking, which the Qwen3 model cards warn against, else ``None``."""
    if not (params.greedy and enable_thinking):
        return None
    return (
        "greedy decoding in thinking mode can repeat itself without end: the Qwen3 model cards recommend "
        "sampling_config.temperature=0.6, top_p=0.95, top_k=20 (or switch thinking off)"
    )


def penalize(logits_V: torch.Tensor, history: Sequence[int], penalty: float) -> torch.Tensor:
    """Make tokens that already occurred less likely (or more, for a penalty below 1).

    Args:
        logits_V: one row, float32 ``[V]``; not modified.
        history: prompt and output ids; repeats count once, ids >= V are ignored.
        penalty: divides positive logits, multiplies negative ones. CTRL (arXiv:1909.05858, 4.1) divides
            both; the sign rule is that of ``transformers``.

    Returns:
        float32 ``[V]``.
    """
    if penalty == 1.0 or not history:
        return logits_V
    seen = torch.tensor(history, dtype=torch.int64, device=logits_V.device)
    seen = seen[seen < logits_V.shape[0]]
    value = logits_V[seen]
    return logits_V.index_copy(0, seen, torch.where(value < 0, value * penalty, value / penalty))


def distribution(logits_V: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution a sampling row draws from.

    Args:
        logits_V: one row, float32 ``[V]``, already penalised, its maximum finite.
        params: with ``temperature`` > 0.

    Returns:
        ids: int64 ``[K]``, ascending: the tokens that survive top-k, then top-p, then min-p.
        probs: float32 ``[K]``, each > 0, summing to 1.

    Ties: top-k keeps every token that equals the k-th, as ``transformers`` does. At the border of top-p the
    number of equal tokens that stay is the library's, whose choice among them is left to an unstable sort;
    here the lowest ids stay, so that top_p near 0 is greedy.
    """
    # Softmax ignores a shift, and with the maximum at 0 no temperature, however small, can overflow.
    scores = (logits_V - logits_V.max()) / params.temperature
    ids = torch.arange(scores.shape[0], device=scores.device)
    if 0 < params.top_k < scores.shape[0]:
        ids = (scores >= scores.topk(params.top_k).values[-1]).nonzero().flatten()
    probs = scores[ids].softmax(0)
    keep = probs > 0
    if params.top_p < 1.0:
        keep &= _nucleus(probs, params.top_p)
    if params.min_p > 0:
        keep &= probs >= params.min_p * probs.max()
    return ids[keep], probs[keep] / probs[keep].sum()


def _nucleus(probs_K: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask, bool ``[K]``: drops the least likely tokens of joint mass <= 1 - top_p, never the likeliest."""
    spare = 1.0 - top_p
    # K tokens below spare / K cannot exceed spare together, so they are out without being sorted: of a
    # vocabulary of 151,936 few remain. The factor 0.5 keeps rounding away from this border.
    keep = probs_K >= 0.5 * spare / probs_K.shape[0]
    mass_out = probs_K[~keep].sum(dtype=torch.float64)
    candidates = keep.nonzero().flatten().flip(0)  # of equal tokens the highest id goes first
    ascending, order = probs_K[candidates].sort(stable=True)
    out = mass_out + ascending.double().cumsum(0) <= spare
    out[-1] = False  # rounding can leave the whole mass at or below spare
    keep[candidates[order[out]]] = False
    return keep


def draw(ids_K: torch.Tensor, probs_K: torch.Tensor, generator: torch.Generator | None) -> int:
    """One multinomial draw by inverting the cumulative distribution: one float64 uniform per call.

    ``torch.multinomial`` takes one random number per *candidate*, by a code path that depends on the build;
    this way a seed means the same tokens on every host, and a filter does not shift a request's later draws.
    """
    cumulative = probs_K.double().cumsum(0)
    u = torch.rand((), dtype=torch.float64, generator=generator)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return int(ids_K[min(index, ids_K.shape[0] - 1)])  # u * total may round up to total


class Sampler:
    """Picks one id below ``vocab_limit`` per row; the columns beyond are padding no tokenizer can decode."""

    def __init__(self, vocab_limit: int) -> None:
        if vocab_limit < 1:
            raise ValueError(f"vocab_limit={vocab_limit}: must be at least 1")
        self.vocab_limit = vocab_limit

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        history: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator | None],
    ) -> list[int]:
        """One token id per row.

        Args:
            logits: ``[B, V]``, any floating dtype and device; not modified. Arithmetic is float32.
            params: B entries; a greedy row takes its largest (penalised) logit, of equals the lowest id.
            history: B lists of prompt and output ids; read only where there is a repetition penalty.
            generators: B CPU generators (see ``SamplingParams.generator``), ignored by greedy rows. A
                sampling row with ``None`` uses torch's global generator, which other rows may share.

        Raises:
            ValueError: the arguments disagree about B.
            FloatingPointError: a row holds NaN or +inf, or only -inf; any token would hide the fault.
        """
        sizes = (len(params), len(history), len(generators))
        if logits.dim() != 2 or set(sizes) != {logits.shape[0]}:
            raise ValueError(f"logits {tuple(logits.shape)} with {sizes} params, histories, generators")
        if not params:
            return []
        logits = logits[:, : self.vocab_limit]
        largest, ids = logits.max(dim=-1)  # NaN wins a maximum, so this finds it too
        bad = (~largest.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise FloatingPointError(
                f"logits of batch rows {bad} are not finite: run in bfloat16 or float32, check the checkpoint"
            )
        picked: list[int] = ids.tolist()
        for i, wish in enumerate(params):
            if wish.greedy and wish.repetition_penalty == 1.0:
                continue
            logits_V = penalize(logits[i].float().cpu(), history[i], wish.repetition_penalty)
            if wish.greedy:
                picked[i] = int(logits_V.argmax())
            else:
                picked[i] = draw(*distribution(logits_V, wish), generators[i])
        return picked
