# SPDX-License-Identifier: Apache-2.0
"""Every rank has all tokens and some of the experts: each computes its own experts' share, one sum makes the whole."""

import torch

from executor.moe.tp import TensorParallel
from executor.parallel.groups import Group


class LocalExperts(TensorParallel):
    """As tensor parallel, with rows of this rank's experts only, and a sum over the ranks that hold the others. Copies
    for other ranks' experts get index -1, which counts as zero in ``combine``."""

    def __init__(self, num_experts: int, mine: range, ep: Group) -> None:
        super().__init__(num_experts)
        self.mine = (mine.start, mine.stop)
        self.ep = ep

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        return self.ep.all_reduce(y_TH)
