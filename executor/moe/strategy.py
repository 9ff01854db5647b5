# SPDX-License-Identifier: Apache-2.0
"""How routed tokens reach their experts and come back: the contract of a strategy, and the choice between them.

T tokens of this rank, K choices per token, R rows sorted by expert, H hidden, E local experts.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from executor.batch import Batch, Phase
from executor.errors import UserError

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


def choose(
    phase: Phase,
    *,
    sharded: bool,
    moe_ep: int,
    top_k: int,
    mc2_refusal: str | None,
    static: bool,
    wanted: StrategyName | None,
) -> Choice:
    """The strategy of a phase.

    Without expert parallelism every rank holds a slice of every expert: route, compute, reduce. With it, tokens that
    are replicated need no exchange either: each rank computes its own experts' share. Sharded tokens have to be
    exchanged. In decode the MC2 kernels do it in one static graph, where they exist and their limits allow. Else the
    volume decides: a rank that gathers T tokens from each of ``ep`` ranks, and scatters as many sums, moves
    ``T * (ep - 1)`` rows each way; one that sends each token to its experts ``T * top_k * (ep - 1) / ep``, on average.

    Args:
        sharded: each rank has tokens of its own in this phase.
        mc2_refusal: why the MC2 kernels cannot be used; None: they can.
        static: the phase is compiled, so its shapes may not depend on the routing.
        wanted: what the recipe asks for; None: the choice is free.
    Raises:
        UserError: ``wanted`` cannot work in this layout.
    """
    if moe_ep == 1:
        legal = {"tp": "moe_ep_size=1: each rank holds a slice of every expert"}
    elif not sharded:
        legal = {"ep_local": "tokens are replicated: each rank computes its own experts' share, nothing is exchanged"}
    else:
        legal = _exchanges(phase, moe_ep, top_k, mc2_refusal)
        if static:
            del legal["ep_double_routing"]
    if wanted is None:
        strategy, reason = next(iter(legal.items()))
        return Choice(strategy, reason)  # type: ignore[arg-type]
    if wanted in legal:
        return Choice(wanted, f"parallel_config.moe_{phase}_strategy")
    why = f" ({mc2_refusal})" if wanted == "ep_mc2" and phase == "decode" and mc2_refusal else ""
    raise UserError(
        f"parallel_config.moe_{phase}_strategy={wanted} cannot work in this layout{why}: tokens are "
        f"{'sharded' if sharded else 'replicated'} in {phase}, moe_ep_size={moe_ep}{', shapes static' * static}; "
        f"legal: {', '.join(legal)}"
    )


def _exchanges(phase: Phase, moe_ep: int, top_k: int, mc2_refusal: str | None) -> dict[str, str]:
    """Strategies that exchange tokens, the best first, each with what speaks for it."""
    gather = "all-gather and reduce-scatter move"
    if top_k > moe_ep:
        why = f"top_k={top_k} > moe_ep_size={moe_ep}"
        volume = {"ep_allgather": f"{why}: {gather} less", "ep_double_routing": "sends each token to its experts"}
    else:
        why = f"top_k={top_k} <= moe_ep_size={moe_ep}"
        volume = {"ep_double_routing": f"{why}: tokens sent to their experts move less", "ep_allgather": gather}
    if phase == "prefill":
        return volume
    static = f"shapes do not depend on the routing; not ep_mc2: {mc2_refusal}"
    eager = {"ep_allgather": static, "ep_double_routing": volume["ep_double_routing"]}
    return {"ep_mc2": "dispatch and combine kernels, one static graph", **eager} if mc2_refusal is None else eager
