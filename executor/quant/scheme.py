# SPDX-License-Identifier: Apache-2.0
"""What a weight format must know about a linear layer: which tensors it needs, where they are in a checkpoint, and
how to multiply with them. One file per format implements it; layers only hold a scheme and ask it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from executor.storage import Storage
    from executor.weights import Slot


class LinearScheme(Protocol):
    def declare(self, layer: nn.Module, in_features: int, out_features: int, storage: "Storage") -> None:
        """Register this format's parameters on ``layer`` for a local ``[in_features, out_features]`` matrix."""

    def slots(
        self, layer: nn.Module, name: str, rows: slice, shape: tuple[int, int], index: tuple[slice, slice]
    ) -> Iterator[tuple[str, "Slot"]]:
        """Where ``name``'s tensors come from: ``rows`` of the layer's outputs hold ``index`` of the ``[out, in]``
        matrix of ``shape`` on disk."""

    def borrow(self, layer: nn.Module, whole: nn.Module, inputs: slice) -> None:
        """Give up the memory that ``declare`` made for ``layer`` and use ``inputs`` of ``whole``'s instead."""

    def finalize(self, layer: nn.Module) -> None:
        """Bring loaded weights into the form that ``apply`` reads. Called once, before the first step."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``[T, in] -> [T, out]``."""
