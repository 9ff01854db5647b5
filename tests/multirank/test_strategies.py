# SPDX-License-Identifier: Apache-2.0
"""The five ways of bringing tokens to their experts equal a loop over tokens and choices, in float64.

Tokens are replicated for ``tp`` and ``ep_local`` and each rank's own for the others. The processes start once per world
size and try all cases, with the project's own experts and collectives.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from executor.batch import Span, build_batch
from executor.model_config import MoeConfig
from executor.moe.ep_allgather import AllGatherExperts
from executor.moe.ep_double_routing import DoubleRouting
from executor.moe.ep_local import LocalExperts
from executor.moe.ep_mc2 import DispatchCombine
from executor.moe.experts import Experts
from executor.moe.tp import TensorParallel
from executor.ops.forms import forms
from executor.parallel.groups import Group, connected_groups, planned_groups
from executor.parallel.layout import Replicated
from executor.storage import Storage
from tests.executor.ops.routing_cases import rand, random_ids
from tests.multirank.ranks import run

HIDDEN, WIDTH, EXPERTS = 6, 8, 8
TOLERANCE = 1e-10  # fp64, and outputs of order 1: the order of the sums differs
STRATEGIES = ("tp", "ep_local", "ep_allgather", "ep_double_routing", "ep_mc2")


@dataclasses.dataclass(frozen=True)
class Case:
    """What every rank brings: ``tokens`` rows each, of which the first ``active[rank]`` are somebody's."""

    name: str
    tokens: int
    top_k: int
    active: tuple[int, ...]
    experts: tuple[int, ...] = tuple(range(EXPERTS))  # that the router ever chooses

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seed = 10 * self.tokens + rank
        where = random_ids(self.tokens, len(self.experts), self.top_k, seed) if self.tokens else None
        ids = torch.tensor(self.experts, dtype=torch.int32)[where] if where is not None else None
        empty = torch.zeros(0, self.top_k, dtype=torch.int32)
        weights = rand(self.tokens, self.top_k, seed=seed).softmax(-1)
        return rand(self.tokens, HIDDEN, seed=seed), empty if ids is None else ids, weights


def cases(world: int) -> list[Case]:
    full = (5,) * world
    return [
        Case("all active", 5, 2, full),
        Case("uneven shares", 5, 2, tuple(range(5, 5 - world, -1))),
        Case("ranks without active tokens", 5, 2, (0,) * (world - 1) + (3,)),
        Case("no active token anywhere", 2, 2, (0,) * world),
        Case("no tokens at all", 0, 2, (0,) * world),
        Case("one request: one token per rank, the first is real", 1, 2, (1,) + (0,) * (world - 1)),
        Case("an expert without tokens", 5, 2, full, experts=(0, 1, 2, 4, 5, 6, 7)),
        Case("ranks whose experts nobody wants", 5, 2, full, experts=(0, 1)),
        Case("all tokens to one expert", 5, 1, full, experts=(5,)),
        Case("one choice", 5, 1, full),
        Case("every expert chosen", 3, EXPERTS, (3,) * world),
    ]


def weights_of_experts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate and up ``[E, H, I]``, down ``[E, I, H]``."""
    return rand(EXPERTS, HIDDEN, WIDTH, seed=1), rand(EXPERTS, HIDDEN, WIDTH, seed=2), rand(EXPERTS, WIDTH, HIDDEN)


def naive(x, ids, weights):
    """Token by token, choice by choice, one vector at a time."""
    gate, up, down = weights_of_experts()
    out = torch.zeros_like(x)
    for token, choice in itertools.product(*map(range, ids.shape)):
        expert = int(ids[token, choice])
        g, u = x[token] @ gate[expert], x[token] @ up[expert]
        out[token] += weights[token, choice] * ((g / (1 + torch.exp(-g)) * u) @ down[expert])
    return out


def made_experts(groups) -> Experts:
    moe = MoeConfig(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=WIDTH, norm_topk_prob=True)
    storage = Storage(torch.float64, torch.device("cpu"), out_in_order=True)
    experts = Experts(moe, HIDDEN, groups.moe_tp, groups.moe_ep, storage, forms())
    gate, up, down = weights_of_experts()
    columns, mine = slice(experts.columns.start, experts.columns.stop), slice(experts.mine.start, experts.mine.stop)
    experts.w13.data.copy_(torch.cat((gate[mine, :, columns], up[mine, :, columns]), -1))
    experts.w2.data.copy_(down[mine, columns])
    return experts


def made(name, groups, mine):
    ep = groups.moe_ep
    match name:
        case "tp":
            return TensorParallel(EXPERTS)
        case "ep_local":
            return LocalExperts(EXPERTS, mine, ep)
        case "ep_allgather":
            return AllGatherExperts(EXPERTS, mine, ep)
        case "ep_double_routing":
            return DoubleRouting(EXPERTS, mine, ep, Replicated(Group("moe_tp")))
        case "ep_mc2":
            return DispatchCombine(EXPERTS, groups.moe_ep_mc2)
        case "ep_mc2, weights sent too":
            return DispatchCombine(EXPERTS, groups.moe_ep_mc2, send_weights=True)


def batch_of(tokens, active):
    spans = [Span([0], 0, [1])] * tokens
    batch = build_batch("decode", spans or [Span([0], 0, [1])], block_size=8, max_blocks=1, causal_mask=None)
    return dataclasses.replace(batch, active=torch.arange(tokens) < active)


def through(strategy, experts, x, ids, weights, batch, shapes=None):
    """The output; ``shapes`` collects, per shape of the input, the shapes that the experts were given."""
    sent = strategy.dispatch(x, ids, weights, batch)
    if shapes is not None:
        shapes.setdefault((x.shape, ids.shape), set()).add((sent.rows_RH.shape, sent.counts_E.shape))
    return strategy.reduce(strategy.combine(experts(sent.rows_RH, sent.counts_E), sent.state))


def worst_differences(world):
    """Per strategy and case the largest difference at active tokens, over all ranks. Inactive ones may hold anything
    that is finite; from the kernels that do not send them, exact zeros."""
    rank = dist.get_rank()
    shapes = {}
    split = connected_groups({"moe_tp": world})
    spread = connected_groups({"moe_ep": world, "moe_ep_mc2": world})
    found = {}
    for name, case in itertools.product((*STRATEGIES, "ep_mc2, weights sent too"), cases(world)):
        groups = split if name == "tp" else spread
        experts = made_experts(groups)
        strategy = made(name, groups, experts.mine)
        if name in ("tp", "ep_local"):  # everybody has the tokens of all
            x, ids, weights = (torch.cat(parts) for parts in zip(*map(case.inputs, range(world))))
            active = torch.cat([torch.arange(case.tokens) < n for n in case.active])
        else:
            x, ids, weights = case.inputs(rank)
            active = torch.arange(case.tokens) < case.active[rank]
        before = [t.clone() for t in (x, ids, weights)]
        batch = batch_of(len(active), int(active.sum()))
        y = through(strategy, experts, x, ids, weights, batch, shapes.setdefault(name, {}))
        y = Replicated(groups.moe_tp).leave(y, batch_of(0, 0))  # as the block does, for slices of an expert
        assert all(torch.equal(a, b) for a, b in zip(before, (x, ids, weights)))
        assert y.shape == x.shape
        assert y.isfinite().all()
        assert not name.startswith("ep_mc2") or not y[~active].any()
        difference = (y - naive(x, ids, weights))[active].abs()
        worst = torch.cat((difference.flatten(), torch.zeros(1, dtype=y.dtype))).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found[f"{name}: {case.name}"] = float(worst)
    found["two in flight"] = two_in_flight(spread)
    # a capturable strategy gives its experts the same shapes wherever the router sends the tokens
    several = {name: max(map(len, seen.values())) > 1 for name, seen in shapes.items()}
    assert several == {name: name == "ep_double_routing" for name in shapes}
    assert not any(made(name, spread, range(1)).capturable == varies for name, varies in several.items())
    return found


def two_in_flight(groups):
    """State travels in return values: the second step is dispatched before the first is combined."""
    rank, worst = dist.get_rank(), 0.0
    first, second = Case("first", 5, 2, ()), Case("second", 3, 4, ())
    for name in ("ep_local", "ep_allgather", "ep_double_routing", "ep_mc2"):
        experts = made_experts(groups)
        strategy = made(name, groups, experts.mine)
        inputs = [case.inputs(0 if name == "ep_local" else rank) for case in (first, second)]
        batches = [batch_of(case.tokens, case.tokens) for case in (first, second)]
        sent = [strategy.dispatch(*given, batch) for given, batch in zip(inputs, batches)]
        for given, s in zip(inputs, sent):
            y = strategy.reduce(strategy.combine(experts(s.rows_RH, s.counts_E), s.state))
            worst = max(worst, float((y - naive(*given)).abs().max()))
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_every_strategy_equals_the_loop(world):
    found = run(world, worst_differences, world)
    assert len(found) == 6 * len(cases(world)) + 1
    assert {key: worst for key, worst in found.items() if not worst < TOLERANCE} == {}


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_alone(name):
    """Every group of size 1 is the identity, and no process group is needed."""
    groups = planned_groups()
    experts = made_experts(groups)
    strategy = made(name, groups, experts.mine)
    for case in cases(1):
        x, ids, weights = case.inputs(0)
        y = through(strategy, experts, x, ids, weights, batch_of(case.tokens, case.tokens))
        torch.testing.assert_close(y, naive(x, ids, weights), rtol=0, atol=TOLERANCE)
