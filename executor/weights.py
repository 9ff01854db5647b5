# SPDX-License-Identifier: Apache-2.0
"""Stream a checkpoint into a model: each slot is filled from its slice of one safetensors tensor; complete or raise.

Layers yield ``(checkpoint name, Slot)``; the union is the model's name map. Before a byte of weights is read, the
names and shapes on disk are compared with it. Names wanted and not there, there and not wanted, there twice, or of
another shape: each is an error that lists them.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from executor.errors import UserError

INDEX = "model.safetensors.index.json"
FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
LFS_POINTER = b"version https://git-lfs"


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
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)


class Checkpoint:
    """The safetensors files of a directory, opened once; ``names`` are normalised to carry the ``model.`` prefix."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self.names: dict[str, tuple[Any, str]] = {}  # normalised name -> (open file, name in it)
        self.itemsize: dict[str, int] = {}
        where: dict[str, str] = {}
        for file_name, expected in self._files().items():
            handle = stack.enter_context(_open(folder / file_name))
            keys = list(handle.offset_keys())  # in file order, so that reading is sequential
            absent = sorted(expected - set(keys))
            if absent:
                raise UserError(
                    f"{folder / INDEX}: {file_name} does not hold {_some(absent)}, which the index says it does; "
                    "index and shards must be of one download"
                )
            for key in keys:
                if key in where:
                    raise UserError(
                        f"{folder}: tensor {key} is in both {where[key]} and {file_name}; which of the two is right "
                        "is unknown: download the checkpoint again"
                    )
                where[key] = file_name
                self.names[key] = (handle, key)
        if not any(name.startswith("model.") for name in self.names):
            self.names = {k if k.startswith("lm_head.") else f"model.{k}": v for k, v in self.names.items()}

    def _files(self) -> dict[str, set[str]]:
        """File name -> tensors that the index promises in it. Only indexed files are read where there is an index."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                content = json.loads(index.read_text(encoding="utf-8"))
                weight_map = {str(k): str(v) for k, v in content["weight_map"].items()}
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{index}: not a safetensors index, a JSON object with weight_map ({type(error).__name__}: "
                    f"{error}); download it again"
                ) from None
            files: dict[str, set[str]] = defaultdict(set)
            for name, file_name in weight_map.items():
                if Path(file_name).name != file_name:
                    raise UserError(
                        f"{index}: {name} points outside of its directory: {file_name}; name files beside the index"
                    )
                files[file_name].add(name)
            missing = [f for f in sorted(files) if not (self.folder / f).is_file()]
            if missing:
                raise UserError(f"{self.folder}: missing shard {_some(missing)}, named by {INDEX}; download it")
            if not files:
                raise UserError(f"{index}: weight_map is empty; download it again")
            return dict(sorted(files.items()))
        found = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not found:
            raise UserError(f"{self.folder}: no safetensors file, and no other format is read; download the weights")
        if len(found) > 1 and "model.safetensors" not in found:
            raise UserError(
                f"{self.folder}: {len(found)} safetensors files but no {INDEX}, so which to read is unknown; "
                "download the index"
            )
        return {"model.safetensors" if len(found) > 1 else found[0]: set()}

    def shape(self, name: str) -> tuple[int, ...]:
        handle, key = self.names[name]
        return tuple(handle.get_slice(key).get_shape())

    def dtype(self, name: str) -> str:
        handle, key = self.names[name]
        return str(handle.get_slice(key).get_dtype())

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        handle, key = self.names[name]
        if all(s == slice(None) for s in index):
            return handle.get_tensor(key)
        return handle.get_slice(key)[index]


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as f:
            if f.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(
                    f"{path}: is a git-lfs pointer, not weights; run `git lfs pull` in the checkpoint's repository"
                )
        return safe_open(path, framework="pt", device="cpu")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); it must be a readable file") from None
    except SafetensorError as error:
        raise UserError(f"{path}: truncated or damaged safetensors file ({error}); download it again") from None


def _some(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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
        report = LoadReport(warnings=checkpoint.warnings)
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
        raise UserError(f"{where}: experts are stored both one by one and fused: {_some(twice)}; remove one of the two")
    fix = "; config.json and weights must be of one model, and the download complete"
    if missing:
        extra = f"; unexpected: {_some(unexpected)}" if unexpected else ""
        if missing == ["lm_head.weight"]:
            fix = "; config.json says tie_word_embeddings=false, which needs it: download it, or set that to true"
        raise UserError(f"{where}: {_count(missing)} missing: {_some(missing)}{extra}{fix}")
    if unexpected:
        raise UserError(f"{where}: {_count(unexpected)} not in this model: {_some(unexpected)}{fix}")
    if misfits:
        raise UserError(f"{where}: {_count(misfits)} of another kind: {_some(misfits.values())}{fix}")
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
