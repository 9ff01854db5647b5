# SPDX-License-Identifier: Apache-2.0
"""The sparse feed-forward block: gate, dispatch, experts, combine."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from executor.batch import Batch, Phase
from executor.moe.experts import Experts
from executor.moe.gate import Gate
from executor.moe.strategy import Strategy
from executor.weights import Slot


class MoeBlock(nn.Module):
    """Prefill and decode may bring tokens to their experts in different ways: one strategy for each."""

    def __init__(self, gate: Gate, experts: Experts, strategies: Mapping[Phase, Strategy]) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.strategies = dict(strategies)

    def partial(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``[T, H] -> [T, H]``, still to be reduced."""
        strategy = self.strategies[batch.phase]
        weights_TK, ids_TK = self.gate(x)
        sent = strategy.dispatch(x, ids_TK, weights_TK, batch)
        return strategy.combine(self.experts(sent.rows_RH, sent.counts_E), sent.state)

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.strategies[batch.phase].reduce(y)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate.slots(f"{prefix}.gate")
        yield from self.experts.slots(f"{prefix}.experts")
