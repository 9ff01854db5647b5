# SPDX-License-Identifier: Apache-2.0
"""Every rank has tokens of its own and some of the experts: gather all tokens, compute the own experts' share, and give
each rank the sum for its tokens."""

import torch

from executor.batch import Batch
from executor.moe.ep_local import LocalExperts
from executor.moe.strategy import Dispatched


class AllGatherExperts(LocalExperts):
    """As local experts, between a gather of the tokens and a sum of which each rank keeps its part. All ranks bring
    equally many tokens."""

    def dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch) -> Dispatched:
        gather = self.ep.all_gather
        return super().dispatch(gather(x_TH), gather(ids_TK), gather(weights_TK), batch)

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        return self.ep.reduce_scatter(y_TH)
