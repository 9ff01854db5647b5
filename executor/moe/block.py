# SPDX-License-Identifier: Apache-2.0
"""The sparse feed-forward block: gate, dispatch, experts, combine."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from executor.batch import Batch, Phase
from executor.moe.experts import Experts
from executor.moe.gate import Gate
from executor.moe.strategy import Strategy
from executor.parallel.layout import Tokens
from executor.weights import Slot


class MoeBlock(nn.Module):
    """Prefill and decode may bring tokens to their experts in different ways: one strategy for each."""

    def __init__(
        self, gate: Gate, experts: Experts, strategies: Mapping[Phase, Strategy], tokens: Mapping[Phase, Tokens]
    ) -> None:
        """``tokens``: over the ranks that split each expert. A strategy deals with those that hold other experts."""
        super().__init__()
        self.tokens = tokens
        self.gate = gate
        self.experts = experts
        self.strategies = dict(strategies)

    def partial(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``[own tokens, H] -> [rows of the strategy, H]``, still to be reduced."""
        x = self.tokens[batch.phase].enter(x, batch)
        strategy = self.strategies[batch.phase]
        weights_TK, ids_TK = self.gate(x)
        sent = strategy.dispatch(x, ids_TK, weights_TK, batch)
        return strategy.combine(self.experts(sent.rows_RH, sent.counts_E), sent.state)

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.tokens[batch.phase].leave(self.strategies[batch.phase].reduce(y), batch)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate.slots(f"{prefix}.gate")
        yield from self.experts.slots(f"{prefix}.experts")
