# SPDX-License-Identifier: Apache-2.0
"""Plain floating-point weights."""

from collections.abc import Iterator

import torch
from torch import nn

from executor.storage import Storage
from executor.weights import Slot


class UnquantizedLinear:
    """One ``weight [in, out]`` in the model's dtype; on disk ``<name>.weight [out, in]``."""

    def declare(self, layer: nn.Module, in_features: int, out_features: int, storage: Storage) -> None:
        layer.weight = storage.matrix(in_features, out_features)

    def slots(
        self, layer: nn.Module, name: str, rows: slice, shape: tuple[int, int], index: tuple[slice, slice]
    ) -> Iterator[tuple[str, Slot]]:
        weight = layer.get_parameter("weight")
        yield f"{name}.weight", Slot(weight, weight.data.t()[rows], shape, index)

    def borrow(self, layer: nn.Module, whole: nn.Module, inputs: slice) -> None:
        shared = whole.get_parameter("weight").data[inputs]
        del layer.weight  # no parameter of its own any more: rows of the other's
        layer.weight = shared

    def finalize(self, layer: nn.Module) -> None:
        """Nothing to do: weights are used as they are loaded."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.matmul(x, layer.weight) if bias is None else torch.addmm(bias, x, layer.weight)  # type: ignore[arg-type]
