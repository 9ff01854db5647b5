# SPDX-License-Identifier: Apache-2.0
"""Init routing against queues filled in token order, finalize routing against a triple loop."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import moe
from tests.executor.ops.routing_cases import rand, random_ids, routed

ops = torch.ops.npu


def buckets(ids_TK, start, end):
    """The oracle of every sort here: walk the copies in row order and drop each into its expert's queue."""
    queues = {e: [] for e in range(start, end)}
    for token, row in enumerate(ids_TK.tolist()):
        for slot, expert in enumerate(row):
            if expert in queues:
                queues[expert].append((token, slot))
    return queues


@settings(deadline=None, max_examples=60)
@given(routed(), st.booleans(), st.integers(-1, 20))
def test_init_routing_v2_equals_the_queues(case, with_scale, active_num):
    x, ids, experts, (start, end) = case
    tokens, top_k = ids.shape
    scale = torch.arange(1.0, tokens + 1) if with_scale else None
    placed = [copy for queue in buckets(ids, start, end).values() for copy in queue]
    rows = min(active_num, tokens * top_k) if active_num > 0 else tokens * top_k
    options = {
        "scale": scale,
        "active_num": active_num,
        "expert_num": experts,
        "expert_tokens_num_flag": True,
        "expert_tokens_num_type": 1,
        "active_expert_range": [start, end],
    }
    expanded, row_idx, counts, expanded_scale = ops.npu_moe_init_routing_v2(x, ids, **options)
    assert expanded.shape == (rows, 3)
    for position, (token, _) in enumerate(placed[:rows]):
        assert torch.equal(expanded[position], x[token])
        assert expanded_scale[position] == token + 1 if with_scale else expanded_scale[position].isnan()
    assert expanded[len(placed) :].isnan().all()
    assert expanded_scale[len(placed) :].isnan().all()
    where = {copy: position for position, copy in enumerate(placed)}
    copies = list(itertools.product(range(tokens), range(top_k)))
    assert row_idx.tolist() == [where.get(copy, -1) for copy in copies]
    assert counts.tolist() == [len(queue) for queue in buckets(ids, start, end).values()]

    dst_to_src = ops.npu_moe_init_routing_v2(x, ids, row_idx_type=1, **options)[1]
    assert [copies[flat] for flat in dst_to_src[: len(placed)].tolist()] == placed
    assert (dst_to_src[len(placed) :] == -1).all()


@settings(deadline=None, max_examples=30)
@given(routed())
def test_expert_tokens_in_all_three_forms(case):
    x, ids, experts, (start, end) = case
    sizes = {e: len(queue) for e, queue in buckets(ids, start, end).items()}

    def expert_tokens(kind):
        return ops.npu_moe_init_routing_v2(
            x,
            ids,
            expert_num=experts,
            expert_tokens_num_flag=True,
            expert_tokens_num_type=kind,
            active_expert_range=[start, end],
        )[2]

    assert expert_tokens(0).tolist() == list(itertools.accumulate(sizes.values()))
    assert expert_tokens(1).tolist() == list(sizes.values())
    busy = [[e, n] for e, n in sizes.items() if n]
    assert expert_tokens(2).tolist() == busy + [[0, 0]] * (experts - len(busy))


@settings(deadline=None, max_examples=40)
@given(routed(max_tokens=9), st.integers(1, 4), st.booleans())
def test_capacity_keeps_the_first_copies_and_pads_with_zeros(case, capacity, with_scale):
    x, ids, experts, _ = case
    tokens, top_k = ids.shape
    scale = torch.arange(1.0, tokens + 1) if with_scale else None
    options = {"expert_num": experts, "drop_pad_mode": 1, "expert_capacity": capacity, "scale": scale}
    if capacity >= tokens:
        with pytest.raises(RuntimeError, match="expert_capacity < T"):
            ops.npu_moe_init_routing_v2(x, ids, **options)
        return
    expanded, row_idx, counts, expanded_scale = ops.npu_moe_init_routing_v2(
        x, ids, expert_tokens_num_flag=True, expert_tokens_num_type=1, **options
    )
    expected = torch.zeros(experts, capacity, 3, dtype=x.dtype)
    expected_row_idx = torch.full((tokens, top_k), -1, dtype=torch.int32)
    expected_scale = torch.zeros(experts, capacity)
    for expert, queue in buckets(ids, 0, experts).items():
        assert counts[expert] == len(queue)
        for rank, (token, slot) in enumerate(queue[:capacity]):
            expected[expert, rank] = x[token]
            expected_scale[expert, rank] = token + 1
            expected_row_idx[token, slot] = expert * capacity + rank
    assert torch.equal(expanded, expected)
    assert torch.equal(row_idx, expected_row_idx.flatten())
    assert torch.equal(expanded_scale, expected_scale.flatten()) or not with_scale


@settings(deadline=None, max_examples=40)
@given(routed(), st.integers(0, 9))
def test_init_routing_v1_equals_the_queues(case, active_num):
    x, ids, experts, _ = case
    tokens, top_k = ids.shape
    column = torch.tensor([[j * tokens + i for j in range(top_k)] for i in range(tokens)], dtype=torch.int32)
    expanded, row_idx, sorted_ids = ops.npu_moe_init_routing(x, column, ids, active_num)
    queues = buckets(ids, 0, experts)
    placed = [copy for queue in queues.values() for copy in queue]
    assert expanded.shape[0] == min(tokens, active_num) * top_k  # active_num counts tokens here, not rows
    assert all(torch.equal(expanded[p], x[token]) for p, (token, _) in enumerate(placed[: len(expanded)]))
    assert [row_idx[slot * tokens + token].item() for token, slot in placed] == list(range(len(placed)))
    assert sorted_ids.tolist() == [e for e, queue in queues.items() for _ in queue]
    ends = ops.npu_moe_compute_expert_tokens(sorted_ids, experts)
    assert ends.dtype == torch.int32
    assert ends.tolist() == list(itertools.accumulate(len(queue) for queue in queues.values()))


def test_init_routing_refusals():
    x, ids = rand(3, 4), random_ids(3, 6, 2, seed=0)
    for quant_mode in (0, 1, 2, 3):
        with pytest.raises(NotImplementedError, match=f"quant_mode {quant_mode}"):
            ops.npu_moe_init_routing_v2(x, ids, expert_num=6, quant_mode=quant_mode)
    for bad in ([2, 2], [3, 1], [0, 7], [-1, 3]):
        with pytest.raises(RuntimeError, match="active_expert_range"):
            ops.npu_moe_init_routing_v2(x, ids, expert_num=6, active_expert_range=bad)
    with pytest.raises(RuntimeError, match="needs all experts active"):
        ops.npu_moe_init_routing_v2(
            x, ids, expert_num=6, active_expert_range=[0, 3], drop_pad_mode=1, expert_capacity=1
        )
    with pytest.raises(ValueError, match="all 6 experts only"):
        moe.init_routing_column(x, ids, 6, (0, 3))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing_equals_the_loop(mode, data):
    tokens, top_k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    experts, capacity, hidden = 4, 3, 2
    size = experts * capacity if mode in (1, 3) else tokens * top_k
    rows = rand(size, hidden, seed=1)
    position = torch.tensor(
        data.draw(st.lists(st.integers(-1, size - 1), min_size=tokens * top_k, max_size=tokens * top_k)),
        dtype=torch.int32,
    )
    if not (position == 0).any():
        rows[0] = math.nan  # the row that a careless -1 would read
    skips = data.draw(st.sampled_from([0, 1, 2]))
    skip1, skip2 = (rand(tokens, hidden, seed=s) if skips >= s else None for s in (1, 2))
    scales = rand(tokens, top_k, seed=2) if data.draw(st.booleans()) else None
    bias = rand(experts, hidden, seed=3) if data.draw(st.booleans()) else None
    ids = torch.randint(experts, (tokens, top_k), generator=torch.Generator().manual_seed(0)).to(torch.int32)

    shaped = rows.view(experts, capacity, hidden) if mode in (1, 3) else rows
    out = ops.npu_moe_finalize_routing(
        shaped, skip1, skip2, bias, scales, position, None if bias is None else ids, mode, k=top_k
    )
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for i in range(tokens):
        expected[i] += sum(skip[i] for skip in (skip1, skip2) if skip is not None)
        for j in range(top_k):
            p = position[j * tokens + i if mode in (0, 1) else i * top_k + j]
            if p >= 0:
                value = rows[p] + (0.0 if bias is None else bias[ids[i, j]])
                expected[i] += value * (1.0 if scales is None else scales[i, j])
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)  # fp64, sums of at most 6 terms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finalize_accumulates_in_fp32_and_rounds_once(dtype):
    rows, weights = rand(32, 5, dtype=dtype), rand(4, 8, dtype=dtype, seed=1)
    out = moe.finalize_routing(rows, weights.double(), torch.arange(32, dtype=torch.int32))
    products = weights.double().unsqueeze(-1) * rows.double().view(4, 8, 5)
    slack = 8 * 2.0**-24 * products.abs().sum(1)  # the worst case of an fp32 sum of 8 products
    rounding = torch.finfo(dtype).eps / 2 * (products.sum(1).abs() + slack)  # one rounding to dtype
    assert out.dtype == dtype
    assert ((out.double() - products.sum(1)).abs() <= slack + rounding).all()


def test_finalize_refusals():
    rows, index, weights = rand(4, 3), torch.arange(4, dtype=torch.int32), torch.ones(2, 2)
    for arguments, message in [
        ((rows, None, rand(2, 3), None, weights, index, None), "skip2 needs skip1"),
        ((rows, None, None, rand(5, 3), weights, index, None), "bias needs export_for_source_row"),
        ((rows, None, None, None, weights, index[:3], None), r"3 entries, not T\*K = 2\*2"),
        ((rows, None, None, None, weights, index, None, 1), r"modes 1 and 3 take \(E, C, H\)"),
        ((rows, None, None, None, weights, index, None, 4), "drop_pad_mode must be 0..3"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.npu_moe_finalize_routing(*arguments)
