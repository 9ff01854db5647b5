# SPDX-License-Identifier: Apache-2.0
"""Stream a checkpoint into a model: each slot is filled from its slice of one safetensors tensor; complete or raise.

Layers yield ``(checkpoint name, Slot)``; the union is the model's name map. Before a byte of weights is read, the
names and shapes on disk are compared with it. Names wanted and not there, there and not wanted, there twice, or of
another shape: each is an error that lists them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from executor.checkpoint import Checkpoint, some
from executor.errors import UserError

FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class Slot:
    """A place to fill.

    Attributes:
        param: the parameter it is a part of; None if this rank has no part of the tensor at all.
        target: that part, as a view in the checkpoint's own orientation; None if another rank holds it.
        shape: shape of the whole tensor on disk.
        index: the slice of it that belongs in ``target``.
        within: name and slot of a fused tensor that may be on disk in place of this one.
    """

    param: nn.Parameter | None
    target: torch.Tensor | None
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    within: "tuple[str, Slot] | None" = None


@dataclass
class LoadReport:
    bytes_read: int = 0
    bytes_of_ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    warm_up_seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)


def _count(tensors: Collection[str]) -> str:
    return f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}"


def load_weights(
    model: nn.Module, folder: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> LoadReport:
    """Fill every parameter of ``model`` (which has ``slots()``) from ``folder``.

    Args:
        on_bytes: called with (bytes read so far, bytes to read) after each tensor.
    Raises:
        UserError: the checkpoint is incomplete, damaged, or is not this model's.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack)
        report = LoadReport()
        tied = _tied_head(model, checkpoint, report)
        reads = _match(list(model.slots()), checkpoint, ignore=tied)  # type: ignore[operator]
        total = sum(_bytes(checkpoint, name, slot) for name, slot in reads)
        for name, slot in reads:
            assert slot.target is not None
            slot.target.copy_(checkpoint.read(name, slot.index))
            report.bytes_read += _bytes(checkpoint, name, slot)
            on_bytes(report.bytes_read, total)
    report.seconds = time.perf_counter() - started
    return report


def _bytes(checkpoint: Checkpoint, name: str, slot: Slot) -> int:
    assert slot.target is not None
    return slot.target.numel() * FLOATS[checkpoint.dtype(name)]


def _tied_head(model: nn.Module, checkpoint: Checkpoint, report: LoadReport) -> set[str]:
    """A checkpoint of a tied model may repeat the embedding as ``lm_head.weight``. Equal: ignored. Different: the
    file's own head is what transformers uses (it then does not tie), so we untie too, and warn."""
    name, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not getattr(model, "tie_word_embeddings", False) or name not in checkpoint.names:
        return set()
    if embedding in checkpoint.names and checkpoint.shape(name) == checkpoint.shape(embedding):
        whole = (slice(None), slice(None))
        if torch.equal(checkpoint.read(name, whole), checkpoint.read(embedding, whole)):
            return {name}
    report.warnings.append(
        f"{checkpoint.folder}: tie_word_embeddings=true, but lm_head.weight differs from the embedding; "
        "lm_head.weight wins (as in transformers); set tie_word_embeddings=false in config.json to silence this"
    )
    model.untie()  # type: ignore[operator]
    return set()


def _match(slots: list[tuple[str, Slot]], checkpoint: Checkpoint, ignore: set[str]) -> list[tuple[str, Slot]]:
    """The reads that fill all of ``slots``, in the files' order. Raises UserError with what does not fit."""
    reads: dict[int, tuple[str, Slot]] = {}
    known, missing, twice, misfits = set(ignore), [], [], {}

    def use(name: str, slot: Slot) -> None:
        known.add(name)
        if checkpoint.shape(name) != slot.shape:
            misfits[name] = f"{name} is {list(checkpoint.shape(name))}, expected {list(slot.shape)}"
        elif checkpoint.dtype(name) not in FLOATS:
            misfits[name] = f"{name} has dtype {checkpoint.dtype(name)}, expected one of {', '.join(FLOATS)}"
        elif slot.target is not None:
            reads[id(slot)] = (name, slot)

    for name, slot in slots:
        alone, fused = name in checkpoint.names, slot.within is not None and slot.within[0] in checkpoint.names
        if alone and fused:
            twice.append(f"{name} (also in {slot.within[0]})")  # type: ignore[index]
        elif alone:
            use(name, slot)
        elif not fused:
            missing.append(name)
        elif id(slot.within[1]) not in reads:  # type: ignore[index]
            use(*slot.within)  # type: ignore[misc]
    unexpected = [name for name in checkpoint.names if name not in known]
    where = checkpoint.folder
    if twice:
        raise UserError(f"{where}: experts are stored both one by one and fused: {some(twice)}; remove one of the two")
    fix = "; config.json and weights must be of one model, and the download complete"
    if missing:
        extra = f"; unexpected: {some(unexpected)}" if unexpected else ""
        if missing == ["lm_head.weight"]:
            fix = "; config.json says tie_word_embeddings=false, which needs it: download it, or set that to true"
        raise UserError(f"{where}: {_count(missing)} missing: {some(missing)}{extra}{fix}")
    if unexpected:
        raise UserError(f"{where}: {_count(unexpected)} not in this model: {some(unexpected)}{fix}")
    if misfits:
        raise UserError(f"{where}: {_count(misfits)} of another kind: {some(misfits.values())}{fix}")
    order = {name: i for i, name in enumerate(checkpoint.names)}
    return sorted(reads.values(), key=lambda read: order[read[0]])


def check_coverage(slots: Iterable[tuple[str, Slot]], parameters: Iterable[nn.Parameter]) -> None:
    """Raises RuntimeError unless the slots fill every element of every parameter once (by count)."""
    filled: dict[int, int] = defaultdict(int)
    for _, slot in slots:
        if slot.target is not None:
            filled[id(slot.param)] += slot.target.numel()
    for param in parameters:
        if filled.get(id(param)) != param.numel():
            raise RuntimeError(f"a parameter of shape {list(param.shape)} has {filled.get(id(param))} slots' elements")


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Fill ``model`` with seeded random weights (matrices N(0, 0.02), norms 1, biases 0): for shapes, not answers."""
    generator: dict[torch.device, torch.Generator] = {}
    for name, param in model.named_parameters():
        if param.device not in generator:
            generator[param.device] = torch.Generator(param.device).manual_seed(seed)
        if name.endswith("bias"):
            param.data.zero_()
        elif param.dim() == 1:
            param.data.fill_(1.0)
        else:
            param.data.normal_(0.0, 0.02, generator=generator[param.device])
