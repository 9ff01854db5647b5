# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone or together with the residual addition before it."""

from collections.abc import Iterator

import torch
from torch import nn

from executor.ops.forms import Forms
from executor.ops.norm import rms_norm
from executor.ops.uncombined import Uncombined
from executor.storage import Storage
from executor.weights import Slot


class RMSNorm(nn.Module):
    """Normalises the last axis, of ``size`` elements, and scales by ``weight``."""

    def __init__(self, size: int, eps: float, storage: Storage, forms: Forms) -> None:
        super().__init__()
        self.forms = forms
        self.weight = storage.vector(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor | Uncombined, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; before the first layer there is no residual yet. Rows that are still
        at their experts are brought back by the same kernel."""
        if isinstance(x, Uncombined):
            return x.add_rms_norm(residual, self.weight, self.eps)  # type: ignore[arg-type]  # never the first
        if residual is None:
            return self.forward(x), x
        return self.forms.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(self.weight, self.weight.data, tuple(self.weight.shape), (slice(None),))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
