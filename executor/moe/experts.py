# SPDX-License-Identifier: Apache-2.0
"""The routed experts of this rank as two grouped matmuls, and both ways in which they lie in a checkpoint.

R rows sorted by expert, E local experts, H hidden, I intermediate size per rank.
"""

from collections.abc import Iterator

import torch
from torch import nn

from executor.model_config import MoeConfig
from executor.ops.forms import Forms
from executor.ops.matmul import grouped_matmul
from executor.parallel.groups import Group
from executor.parallel.layout import shard
from executor.storage import Storage
from executor.weights import Slot


class Experts(nn.Module):
    """``rows [R, H], counts [E] -> [R, H]``: gate and up merged in ``w13 [E, H, 2I]``, down in ``w2 [E, I, H]``."""

    def __init__(
        self, moe: MoeConfig, hidden_size: int, moe_tp: Group, moe_ep: Group, storage: Storage, forms: Forms
    ) -> None:
        super().__init__()
        self.forms = forms
        self.num_experts = moe.num_experts
        self.width = moe.moe_intermediate_size
        self.mine = shard(moe.num_experts, moe_ep, "num_experts")
        self.columns = shard(self.width, moe_tp, "moe_intermediate_size")
        self.w13 = storage.experts(len(self.mine), hidden_size, 2 * len(self.columns))
        self.w2 = storage.experts(len(self.mine), len(self.columns), hidden_size)

    def forward(self, rows_RH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(self.forms.swiglu(grouped_matmul(rows_RH, self.w13, counts_E)), self.w2, counts_E)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Per expert (``prefix.N.gate_proj.weight`` ...), each matrix with the fused tensor that may hold it instead
        (``prefix.gate_up_proj [E, 2I, H]``, ``prefix.down_proj [E, H, I]``, as transformers 5 has them in memory).
        Experts of other ranks are listed too, with nothing to fill, so that a missing one is noticed by all."""
        hidden, local, all_ = self.w13.shape[1], len(self.columns), slice(None)
        experts = slice(self.mine.start, self.mine.stop)
        w13, w2 = self.w13.data.mT, self.w2.data.mT  # [E, 2I, H] and [E, H, I], as on disk
        for half, name in enumerate(("gate_proj", "up_proj")):
            rows = slice(half * local, (half + 1) * local)
            keep = slice(self.columns.start, self.columns.stop)
            whole = slice(half * self.width + keep.start, half * self.width + keep.stop)
            shape = (self.num_experts, 2 * self.width, hidden)
            fused = (f"{prefix}.gate_up_proj", Slot(self.w13, w13[:, rows], shape, (experts, whole, all_)))
            yield from self._per_expert(prefix, name, self.w13, w13[:, rows], (self.width, hidden), (keep, all_), fused)
        keep = slice(self.columns.start, self.columns.stop)
        shape = (self.num_experts, hidden, self.width)
        fused = (f"{prefix}.down_proj", Slot(self.w2, w2, shape, (experts, all_, keep)))
        yield from self._per_expert(prefix, "down_proj", self.w2, w2, (hidden, self.width), (all_, keep), fused)

    def _per_expert(
        self,
        prefix: str,
        name: str,
        param: nn.Parameter,
        local: torch.Tensor,
        shape: tuple[int, int],
        index: tuple[slice, slice],
        fused: tuple[str, Slot],
    ) -> Iterator[tuple[str, Slot]]:
        for expert in range(self.num_experts):
            target = local[expert - self.mine.start] if expert in self.mine else None
            yield f"{prefix}.{expert}.{name}.weight", Slot(param, target, shape, index, within=fused)
