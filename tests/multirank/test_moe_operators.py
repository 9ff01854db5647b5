# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over gloo against loops over the tokens of all ranks, and what all ranks refuse together.

A case is drawn from its number alone, so every rank knows what all others bring and can say what it has to receive.
"""

import random

import pytest
import torch
import torch.distributed as dist

import executor.ops.reference  # noqa: F401  registers the kernels
from tests.executor.ops.routing_cases import rand, random_ids
from tests.multirank.ranks import run

ops = torch.ops.npu

HIDDEN = 3
CASES = 50
# fp64: sums of at most 8 terms. fp32, bf16: half a unit in the last place for the result, and the sum in fp32
EPS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


class Case:
    """Tensors of all ranks, by rank. Masks are None, of whole tokens, or of single choices."""

    def __init__(self, number, world):
        draw = random.Random(1000 * world + number)
        self.world, self.experts = world, world * draw.randint(1, 3)
        self.top_k = draw.choice([1, self.experts, draw.randint(1, self.experts)])
        self.dtype = draw.choice(list(EPS))
        equal, most = draw.random() < 0.7, draw.choice([0, 1, 2, 5])
        self.tokens = [most if equal else draw.randint(0, most) for _ in range(world)]
        largest = max(self.tokens) * world
        # with unequal shares the largest has to be given; it may always be, and more than that
        self.global_bs = draw.choice([0, largest]) if len(set(self.tokens)) == 1 else largest + draw.choice([0, world])
        self.nums_type, self.send_weights = draw.choice([0, 1]), draw.random() < 0.5
        masked = draw.choice([0, 1, 2]) if len(set(self.tokens)) == 1 else 0
        self.x, self.ids, self.weights, self.masks = [], [], [], []
        for rank, tokens in enumerate(self.tokens):
            seed = 100 * number + rank
            ids = random_ids(tokens, self.experts, self.top_k, seed) if tokens else None
            if ids is not None and number % 4 == 0:  # everybody wants the same experts
                ids = torch.arange(self.top_k, dtype=torch.int32).expand(tokens, -1).contiguous()
            self.ids.append(torch.zeros(0, self.top_k, dtype=torch.int32) if ids is None else ids)
            self.x.append(rand(tokens, HIDDEN, dtype=self.dtype, seed=seed))
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            self.weights.append(rand(tokens, self.top_k, dtype=wide, seed=seed + 50))
            live = draw.randint(0, tokens)
            choices = torch.tensor([[draw.random() < 0.6 for _ in range(self.top_k)] for _ in range(tokens)])
            whole = torch.arange(tokens) < live
            self.masks.append([None, whole, choices.reshape(tokens, self.top_k).bool()][masked])

    def takes_part(self, rank, token, choice):
        mask = self.masks[rank]
        return mask is None or bool(mask[token] if mask.dim() == 1 else mask[token, choice])

    def arrivals(self, rank):
        """(expert, source rank, token, choice) in the order in which ``rank`` has them."""
        local = self.experts // self.world
        return [
            (expert, source, token, choice)
            for expert in range(rank * local, (rank + 1) * local)
            for source in range(self.world)
            for token in range(self.tokens[source])
            for choice in range(self.top_k)
            if int(self.ids[source][token, choice]) == expert and self.takes_part(source, token, choice)
        ]


def computed(rows, experts):
    """A different affine map per expert, so that a row at the wrong expert, or home, is seen."""
    return rows * (experts.unsqueeze(-1) + 2).to(rows.dtype) - experts.unsqueeze(-1).to(rows.dtype) / 4


def shapes(outputs):
    return [(tuple(t.shape), t.stride(), t.dtype) for t in outputs]


def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def call(op, *args, **kwargs):
    """The outputs of the CPU kernel, after a look at what the Meta kernel says of them."""
    outputs = op(*args, **kwargs)
    meta = op(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()})
    pair = [(out,) if isinstance(out, torch.Tensor) else out for out in (outputs, meta)]
    assert shapes(pair[0]) == shapes(pair[1])
    return outputs


def check_case(case, rank, name):
    """This rank's part of one case, both ways."""
    own = (case.x[rank], case.ids[rank])
    where = (name, case.world, rank, case.experts)
    options = {"x_active_mask": case.masks[rank], "shared_expert_num": 0, "global_bs": case.global_bs}
    weights = case.weights[rank]
    sent = weights.float() if case.send_weights else None
    rows, scales, assist, nums, recv_counts, tp_counts, sent_weights = call(
        ops.npu_moe_distribute_dispatch_v2,
        *own,
        *where,
        expert_scales=sent,
        expert_token_nums_type=case.nums_type,
        **options,
    )
    arrivals, local = case.arrivals(rank), case.experts // case.world
    most = (case.global_bs or case.world * case.tokens[0]) * min(local, case.top_k)
    assert rows.shape == (most, HIDDEN)
    expected = [case.x[source][token] for _, source, token, _ in arrivals]
    assert torch.equal(rows[: len(arrivals)], torch.stack(expected) if expected else rows[:0])
    assert rows[len(arrivals) :].isnan().all()
    assert scales.isnan().all()
    assert tp_counts.numel() == 0
    mine = range(rank * local, (rank + 1) * local)
    per_expert = torch.tensor([sum(1 for a in arrivals if a[0] == e) for e in mine])
    assert torch.equal(nums, per_expert if case.nums_type else per_expert.cumsum(0))
    pairs = [sum(1 for a in arrivals if a[:2] == (e, source)) for e in mine for source in range(case.world)]
    assert recv_counts.tolist() == torch.tensor(pairs).cumsum(0).tolist()
    if sent is not None:
        travelled = [case.weights[source][token, choice].float() for _, source, token, choice in arrivals]
        assert sent_weights[: len(arrivals)].tolist() == [float(w) for w in travelled]
        assert sent_weights[len(arrivals) :].isnan().all()

    expert_of = torch.tensor([a[0] for a in arrivals] + [0] * (most - len(arrivals)))
    answers = computed(rows, expert_of)  # the poisoned tail stays in it
    back = (answers, case.ids[rank], assist, recv_counts, weights)
    out = call(ops.npu_moe_distribute_combine_v2, *back, *where, expand_scales=sent_weights, **options)
    assert out.dtype == case.dtype
    residual, gamma = rand(len(out), 1, HIDDEN).to(case.dtype), rand(HIDDEN).to(case.dtype)
    fused = ops.npu_moe_distribute_combine_add_rms_norm
    in_one = call(fused, *back, residual, gamma, *where, expand_scales=sent_weights, norm_eps=0.1, **options)
    in_turn = ops.npu_add_rms_norm(residual, out.unsqueeze(1), gamma, 0.1)  # the same arithmetic, so bit for bit
    assert all(map(torch.equal, in_one, in_turn))
    for token in range(case.tokens[rank]):
        total, size = torch.zeros(HIDDEN, dtype=torch.float64), torch.zeros(HIDDEN, dtype=torch.float64)
        for choice in range(case.top_k):
            if case.takes_part(rank, token, choice):
                answer = computed(case.x[rank][token : token + 1], case.ids[rank][token, choice : choice + 1])[0]
                term = answer.double() * weights[token, choice].double()
                total, size = total + term, size + term.abs()
        assert ((out[token].double() - total).abs() <= EPS[case.dtype] * size).all()  # exact zero if nothing took part
    return len(arrivals)


def exchange(cases):
    """Every case on this rank; returns how many rows arrived here in all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    backwards = dist.new_group(list(range(world)))  # a group of its own, found by its name
    total = sum(check_case(Case(n, world), rank, backwards.group_name) for n in range(cases))
    check_refusals(rank, world, backwards.group_name)
    return total


def check_refusals(rank, world, name):
    """What only shows between ranks: all of them refuse, so none waits."""
    tokens = 2 + (rank == 0)
    x, ids = rand(tokens, HIDDEN), torch.zeros(tokens, 1, dtype=torch.int32)
    mask = torch.arange(tokens) < 1
    where = (name, world, rank, world)
    with pytest.raises(RuntimeError, match="does not fit their tokens"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, *where)
    with pytest.raises(RuntimeError, match="does not fit their tokens"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, *where, global_bs=2 * world)
    with pytest.raises(RuntimeError, match="does not fit their tokens"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, *where, global_bs=(3 + rank) * world)
    with pytest.raises(RuntimeError, match="x_active_mask must be true everywhere"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, *where, x_active_mask=mask, global_bs=3 * world)
    with pytest.raises(RuntimeError, match=f"has size={world}, rank={rank}, not"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, name, world, (rank + 1) % world, world)


@pytest.mark.parametrize("world", [2, 4])
def test_dispatch_and_combine_equal_loops_over_all_tokens(world):
    assert run(world, exchange, CASES) > CASES


def test_one_rank_needs_no_group():
    for number in range(CASES):
        check_case(Case(number, 1), 0, "")
