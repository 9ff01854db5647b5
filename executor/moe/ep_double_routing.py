# SPDX-License-Identifier: Apache-2.0
"""Every rank has tokens of its own and some of the experts: send each token to its experts, and the results back.

Routed twice: at home by expert, so that what goes to one rank lies together; and on arrival, where the rows of an
expert come from several ranks. Nothing is padded, so the shapes depend on the router. Rows that belong to nobody are
alike, so a router would send them all to the same experts; they are dealt out instead.
"""

from dataclasses import dataclass

import torch

from executor.batch import Batch
from executor.moe.gate import in_turn
from executor.moe.strategy import Dispatched
from executor.ops.moe import finalize_routing, init_routing, re_routing, undo_re_routing
from executor.parallel.groups import Group
from executor.parallel.layout import Tokens


@dataclass(frozen=True)
class RoutedTwice:
    weights_TK: torch.Tensor
    row_idx: torch.Tensor  # [T * K], where each (token, choice) went at home
    source: torch.Tensor  # [R], where each row lay on arrival
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank


class DoubleRouting:
    capturable = False

    def __init__(self, num_experts: int, mine: range, ep: Group, slices: Tokens) -> None:
        """``slices``: how tokens entered over the ranks that split each expert."""
        self.num_experts = num_experts
        self.num_local = len(mine)
        self.ep = ep
        self.slices = slices

    def dispatch(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch) -> Dispatched:
        active_T = self.slices.enter(batch.active.to(torch.uint8), batch).bool()
        ids_TK = torch.where(active_T.unsqueeze(-1), ids_TK, in_turn(ids_TK, self.num_experts))
        leaving_RH, row_idx, counts_E = init_routing(x_TH, ids_TK, self.num_experts, (0, self.num_experts))
        leaving, arriving = (c.view(self.ep.size, self.num_local) for c in (counts_E, self.ep.all_to_all(counts_E)))
        sent, received = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()  # the one wait for the device
        arrived_RH = self.ep.all_to_all(leaving_RH, sent, received)
        rows_RH, source, counts = re_routing(arrived_RH, arriving)
        return Dispatched(rows_RH, counts, RoutedTwice(weights_TK, row_idx, source, sent, received))

    def combine(self, y_RH: torch.Tensor, state: RoutedTwice) -> torch.Tensor:
        y_RH = self.ep.all_to_all(undo_re_routing(y_RH, state.source), state.received, state.sent)
        return finalize_routing(y_RH, state.weights_TK, state.row_idx)

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor:
        return y_TH
