# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone or together with the residual addition before it."""

from collections.abc import Iterator

import torch
from torch import nn

from executor.ops import norm as ops
from executor.storage import Storage
from executor.weights import Slot


class RMSNorm(nn.Module):
    """Normalises the last axis, of ``size`` elements, and scales by ``weight``."""

    def __init__(self, size: int, eps: float, storage: Storage) -> None:
        super().__init__()
        self.weight = storage.vector(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; before the first layer there is no residual yet."""
        if residual is None:
            return self.forward(x), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(self.weight, self.weight.data, tuple(self.weight.shape), (slice(None),))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
