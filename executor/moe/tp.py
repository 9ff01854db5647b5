# SPDX-License-Identifier: Apache-2.0
"""Every rank holds a slice of every expert: nothing to exchange between experts."""

from dataclasses import dataclass

import torch

from executor.batch import Batch
from executor.moe.strategy import Dispatched
from executor.ops.moe import finalize_routing, init_routing


@dataclass(frozen=True)
class RoutedLocally:
    weights_TK: torch.Tensor
    row_idx: torch.Tensor  # [T * K], where each (token, choice) went


class TensorParallel:
    capturable = True

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.mine = (0, num_experts)

    def dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch) -> Dispatched:
        rows_RH, row_idx, counts_E = init_routing(x_TH, ids_TK, self.num_experts, self.mine)
        return Dispatched(rows_RH, counts_E, RoutedLocally(weights_TK, row_idx))

    def combine(self, y_RH: torch.Tensor, state: RoutedLocally) -> torch.Tensor:
        return finalize_routing(y_RH, state.weights_TK, state.row_idx)

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        return y_TH
