# SPDX-License-Identifier: Apache-2.0
"""The sparse feed-forward block: gate, dispatch, experts, combine."""

from collections.abc import Iterator

import torch
from torch import nn

from executor.moe.experts import Experts
from executor.moe.gate import Gate
from executor.moe.strategy import Strategy
from executor.weights import Slot


class MoeBlock(nn.Module):
    def __init__(self, gate: Gate, experts: Experts, strategy: Strategy) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.strategy = strategy

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``, still to be reduced."""
        weights_TK, ids_TK = self.gate(x)
        sent = self.strategy.dispatch(x, ids_TK, weights_TK)
        return self.strategy.combine(self.experts(sent.rows_RH, sent.counts_E), sent.state)

    def reduce(self, y: torch.Tensor) -> torch.Tensor:
        return self.strategy.reduce(y)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate.slots(f"{prefix}.gate")
        yield from self.experts.slots(f"{prefix}.experts")
