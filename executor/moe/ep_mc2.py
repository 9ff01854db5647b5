# SPDX-License-Identifier: Apache-2.0
"""Every rank has tokens of its own and some of the experts: one kernel sends and sorts, one brings back and sums.

The rows are padded to the most that can arrive, so the shapes do not depend on the router and one static graph serves
all steps. Tokens that are not active are not sent.
"""

import torch

from executor.batch import Batch
from executor.moe.strategy import Dispatched
from executor.ops.moe import ExpertRanks, distribute_dispatch
from executor.ops.uncombined import Sent, Uncombined
from executor.parallel.groups import Group


class DispatchCombine:
    capturable = True

    def __init__(self, num_experts: int, ep: Group, *, send_weights: bool = False) -> None:
        """``ep``: with a communicator of its own, which no other operator uses. ``send_weights``: whether this
        product's kernels want the routing weights at dispatch already (``mc2_limits``)."""
        self.num_experts = num_experts
        self.ep = ep
        self.send_weights = send_weights

    def dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch) -> Dispatched:
        """All ranks bring equally many tokens, those of ``batch.active`` first."""
        ranks = ExpertRanks(self.ep.hccl_name, self.ep.size, self.ep.rank, self.num_experts, x_TH.shape[0])
        sent_weights = weights_TK if self.send_weights else None
        rows_RH, counts, route = distribute_dispatch(x_TH, ids_TK, batch.active, ranks, sent_weights)
        return Dispatched(rows_RH, counts, Sent(ids_TK, weights_TK, batch.active, ranks, route))

    def combine(self, y_RH: torch.Tensor, state: Sent) -> torch.Tensor:
        """Zero for tokens that are not active."""
        return Uncombined(y_RH, state).combined()

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        return y_TH


class CombineInNextNorm(DispatchCombine):
    """Leaves the rows at their experts: the norm that follows brings them back, in one kernel with its own work."""

    def combine(self, y_RH: torch.Tensor, state: Sent) -> Uncombined:  # type: ignore[override]
        return Uncombined(y_RH, state)
