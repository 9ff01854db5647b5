# SPDX-License-Identifier: Apache-2.0
"""Every rank has all tokens and some of the experts: each computes its own experts' share, one sum makes the whole."""

import torch

from executor.batch import Batch
from executor.moe.strategy import Dispatched
from executor.moe.tp import RoutedLocally, TensorParallel
from executor.ops.moe import init_routing
from executor.parallel.groups import Group


class LocalExperts(TensorParallel):
    """As tensor parallel, with rows of this rank's experts only, and a sum over the ranks that hold the others."""

    def __init__(self, num_experts: int, mine: range, ep: Group) -> None:
        super().__init__(num_experts)
        self.mine = (mine.start, mine.stop)
        self.ep = ep

    def dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch) -> Dispatched:
        """Other ranks' experts get index -1, which counts as zero in ``combine``."""
        rows_RH, row_idx, counts_E = init_routing(x_TH, ids_TK, self.num_experts, self.mine)
        return Dispatched(rows_RH, counts_E, RoutedLocally(weights_TK, row_idx))

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        return self.ep.all_reduce(y_TH)
