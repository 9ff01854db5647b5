# SPDX-License-Identifier: Apache-2.0
"""The router: which experts a token goes to, and with which weights. T tokens, E experts, K choices per token."""

from collections.abc import Iterator

import torch
from torch import nn

from executor.model_config import MoeConfig
from executor.ops.forms import Forms
from executor.storage import Storage
from executor.weights import Slot


class Gate(nn.Module):
    """``x [T, hidden] -> (weights [T, K], ids [T, K] int32)``, softmax over all experts and the K largest of it."""

    def __init__(self, moe: MoeConfig, hidden_size: int, storage: Storage, forms: Forms) -> None:
        super().__init__()
        self.forms = forms
        self.num_experts = moe.num_experts
        self.top_k = moe.num_experts_per_tok
        self.renormalize = moe.norm_topk_prob
        self.weight = storage.matrix(hidden_size, moe.num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forms.gate_topk(torch.matmul(x, self.weight), self.top_k, self.renormalize)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        shape = (self.num_experts, self.weight.shape[0])
        yield f"{name}.weight", Slot(self.weight, self.weight.data.t(), shape, (slice(None), slice(None)))


def in_turn(ids_TK: torch.Tensor, num_experts: int, first: int = 0) -> torch.Tensor:
    """Experts ``first``, ``first + 1`` and so on, around and around, in the shape and dtype of ``ids_TK``."""
    turn = torch.arange(first, first + ids_TK.numel(), dtype=ids_TK.dtype, device=ids_TK.device)
    return (turn % num_experts).view_as(ids_TK)


class BalancedGate(Gate):
    """The router's own weights, but experts in turn (``force_eplb``): random weights would route unevenly, and a
    benchmark of shapes would then measure that unevenness. The answers mean nothing."""

    def __init__(self, moe: MoeConfig, hidden_size: int, storage: Storage, forms: Forms, turn: int) -> None:
        """``turn``: number of this rank among those that bring other tokens to the same experts; each goes on where
        the one before it stopped."""
        super().__init__(moe, hidden_size, storage, forms)
        self.turn = turn

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().forward(x)
        return weights, in_turn(ids, self.num_experts, self.turn * ids.numel())
