# SPDX-License-Identifier: Apache-2.0
"""Linear layers that own their shard and their checkpoint names.

Column splits outputs; row splits inputs, so that its output is this rank's summand of the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from executor.quant.scheme import LinearScheme
from executor.storage import Storage
from executor.weights import Slot


@dataclass(frozen=True)
class Part:
    """One checkpoint matrix and the axis of it that is split: its length on disk, and what this rank keeps of it."""

    name: str
    size: int
    keep: range


class ColumnParallelLinear(nn.Module):
    """``[T, in] -> [T, sum of kept rows]``: one matmul for several checkpoint matrices side by side."""

    def __init__(
        self, in_features: int, parts: tuple[Part, ...], *, bias: bool, storage: Storage, scheme: LinearScheme
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = parts
        self.scheme = scheme
        self.sizes = [len(part.keep) for part in parts]
        scheme.declare(self, in_features, sum(self.sizes), storage)
        self.bias = storage.vector(sum(self.sizes)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self, x, self.bias)

    def finalize(self) -> None:
        self.scheme.finalize(self)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """``prefix`` is the parent's checkpoint name; each part adds its own."""
        start = 0
        for part in self.parts:
            rows = slice(start, start + len(part.keep))
            index = slice(part.keep.start, part.keep.stop)
            yield from self.scheme.slots(
                self, f"{prefix}.{part.name}", rows, (part.size, self.in_features), (index, slice(None))
            )
            if self.bias is not None:
                yield f"{prefix}.{part.name}.bias", Slot(self.bias, self.bias.data[rows], (part.size,), (index,))
            start += len(part.keep)


class RowParallelLinear(nn.Module):
    """``[T, kept inputs] -> [T, out]``: a summand of the result, unless all inputs are kept. How it becomes the result
    is up to the layer that holds this. ``bias`` belongs to one of the ranks: ``holds_bias``."""

    bias: nn.Parameter | None

    def __init__(
        self, part: Part, out_features: int, *, bias: bool, holds_bias: bool, storage: Storage, scheme: LinearScheme
    ) -> None:
        """``part`` says which inputs, columns on disk, this rank keeps."""
        super().__init__()
        self.name = part.name
        self.shape = (out_features, part.size)
        self.columns = slice(part.keep.start, part.keep.stop)
        self.scheme = scheme
        scheme.declare(self, len(part.keep), out_features, storage)
        self.has_bias = bias
        self.bias = storage.vector(out_features) if bias and holds_bias else None

    def borrow(self, whole: "RowParallelLinear") -> None:
        """Use the memory of ``whole``, which keeps all inputs, for this layer's."""
        self.scheme.borrow(self, whole, self.columns)
        if self.bias is not None:
            self.bias = whole.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self, x, self.bias)

    def finalize(self) -> None:
        self.scheme.finalize(self)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        name = f"{prefix}.{self.name}"
        yield from self.scheme.slots(self, name, slice(None), self.shape, (slice(None), self.columns))
        if self.has_bias:
            mine = None if self.bias is None else self.bias.data
            yield f"{name}.bias", Slot(self.bias, mine, (self.shape[0],), (slice(None),))
