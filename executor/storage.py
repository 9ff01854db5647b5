# SPDX-License-Identifier: Apache-2.0
"""How parameters are laid out in memory. Logical shapes are the same on every platform; only strides differ.

A matrix is always used as ``x @ weight`` with ``weight [in, out]``. On an NPU it is stored that way, because a
``[out, in]`` weight would cost a Transpose node per use in a GE graph (a head tied to the embedding still does). A CPU
reads ``[out, in]`` rows faster when there are few tokens, so there the same logical matrix is a transposed view of
``[out, in]`` storage.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Storage:
    """Where new parameters live: their dtype, device and memory order."""

    dtype: torch.dtype
    device: torch.device
    out_in_order: bool

    def matrix(self, in_features: int, out_features: int) -> nn.Parameter:
        """Uninitialised ``[in, out]``."""
        return self._parameter((in_features, out_features))

    def experts(self, num_experts: int, in_features: int, out_features: int) -> nn.Parameter:
        """Uninitialised ``[experts, in, out]``."""
        return self._parameter((num_experts, in_features, out_features))

    def vector(self, size: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)

    def _parameter(self, shape: tuple[int, ...]) -> nn.Parameter:
        stored = (*shape[:-2], shape[-1], shape[-2]) if self.out_in_order else shape
        data = torch.empty(stored, dtype=self.dtype, device=self.device)
        return nn.Parameter(data.mT if self.out_in_order else data, requires_grad=False)
