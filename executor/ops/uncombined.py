# SPDX-License-Identifier: Apache-2.0
"""Rows that are still at their experts' ranks, and the ways to bring them back. T tokens, K choices, A arrived rows, H
hidden size."""

from dataclasses import dataclass

from torch import Tensor

from executor.ops.moe import ExpertRanks, Route, distribute_combine, distribute_combine_add_rms_norm


@dataclass(frozen=True)
class Sent:
    """What ``distribute_dispatch`` was given and has said, as far as the way back needs it."""

    ids_TK: Tensor
    weights_TK: Tensor
    active_T: Tensor
    ranks: ExpertRanks
    route: Route


@dataclass(frozen=True)
class Uncombined:
    """``rows_AH``: results of the experts for the rows that arrived."""

    rows_AH: Tensor
    sent: Sent

    def combined(self) -> Tensor:
        """Each token's weighted sum ``[T, H]``, zero for tokens that are not active."""
        return distribute_combine(*self._arguments())

    def add_rms_norm(self, residual_TH: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``(norm(combined + residual), combined + residual)`` in one kernel."""
        return distribute_combine_add_rms_norm(*self._arguments(), residual_TH, gamma, eps)

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, ExpertRanks, Route]:
        sent = self.sent
        return self.rows_AH, sent.ids_TK, sent.weights_TK, sent.active_T, sent.ranks, sent.route
