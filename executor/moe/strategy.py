# SPDX-License-Identifier: Apache-2.0
"""How routed tokens reach their experts and come back: the contract of a strategy, and the choice between them.

T tokens of this rank, K choices per token, R rows sorted by expert, H hidden, E local experts.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from executor.batch import Batch, Phase

StrategyName = Literal["tp", "ep_local", "ep_allgather", "ep_double_routing", "ep_mc2"]


@dataclass(frozen=True)
class Dispatched:
    """Rows at their experts. ``state`` is what ``combine`` needs to bring them back: it travels here and never in
    the strategy, so that two micro-batches can be in flight."""

    rows_RH: torch.Tensor
    counts_E: torch.Tensor
    state: Any


class Strategy(Protocol):
    capturable: bool
    """Whether shapes are independent of the routing, as a static graph needs."""

    def dispatch(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, batch: Batch
    ) -> Dispatched: ...

    def combine(self, y_RH: torch.Tensor, state: Any) -> torch.Tensor:
        """``[R, H] -> [T, H]``, weighted and summed over K; a partial sum where ``reduce`` communicates."""

    def reduce(self, y_TH: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Choice:
    strategy: StrategyName
    reason: str


def choose(phase: Phase, *, moe_ep: int, attn_dp: int, top_k: int, has_mc2: bool) -> Choice:
    """The strategy of a phase.

    Without expert parallelism every rank holds a slice of every expert: route, compute, all-reduce. With it, tokens
    that are replicated (attention DP 1) need no exchange either: each rank computes its own experts' share. Tokens
    that are not have to be exchanged. In decode the MC2 kernels do it inside one static graph. In prefill the volume
    decides: gathering all tokens moves ``T * ep`` rows each way, sending each token to its experts ``T * top_k``.
    """
    if moe_ep == 1:
        return Choice("tp", "moe_ep_size=1: each rank holds a slice of every expert, one all-reduce")
    if attn_dp == 1:
        return Choice("ep_local", "tokens are replicated (attn_dp 1): no dispatch, one all-reduce")
    if phase == "decode" and has_mc2:
        return Choice("ep_mc2", "attn_dp > 1: dispatch and combine kernels keep the shapes static")
    if top_k > moe_ep or phase == "decode":
        why = f"top_k={top_k} > moe_ep_size={moe_ep}" if phase == "prefill" else "no MC2 kernels on this platform"
        return Choice("ep_allgather", f"{why}: all-gather and reduce-scatter move less, and shapes stay static")
    return Choice(
        "ep_double_routing", f"top_k={top_k} <= moe_ep_size={moe_ep}: sending tokens to their experts moves less"
    )
