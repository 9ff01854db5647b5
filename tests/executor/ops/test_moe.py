# SPDX-License-Identifier: Apache-2.0
"""MoE routing operators against token-by-token Python loops, and the whole block against a dense per-token MoE."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import matmul, moe

ops = torch.ops.npu


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_ids(tokens, experts, top_k, seed):
    """K different experts per token, as a router gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32)


# ---- gating ------------------------------------------------------------------------------------------------------


def gate_one_token(logits, top_k, renormalize):
    """Softmax, then the best K by (-probability, expert id), in Python floats."""
    exps = [math.exp(v - max(logits)) for v in logits]
    probabilities = [e / sum(exps) for e in exps]
    ids = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
    weights = [probabilities[e] for e in ids]
    return [w / sum(weights) for w in weights] if renormalize else weights, ids


def gate_by_loop(logits_TE, top_k, renormalize):
    rows = [gate_one_token(row, top_k, renormalize) for row in logits_TE.double().tolist()]
    weights = torch.tensor([w for w, _ in rows], dtype=torch.float64)
    return weights, torch.tensor([ids for _, ids in rows], dtype=torch.int32)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
@pytest.mark.parametrize("gate", [moe.gate_topk, moe.gate_topk_unfused])
def test_gates_equal_the_loop(gate, data):
    tokens, experts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    top_k, renormalize = data.draw(st.integers(1, experts)), data.draw(st.booleans())
    # a coarse grid, so that ties are common
    values = st.lists(st.integers(-3, 3).map(lambda v: v / 2), min_size=experts, max_size=experts)
    logits = torch.tensor(data.draw(st.lists(values, min_size=tokens, max_size=tokens)), dtype=torch.float32)
    weights, ids = gate(logits, top_k, renormalize)
    expected_weights, expected_ids = gate_by_loop(logits, top_k, renormalize)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=2e-6, atol=0)  # exp and sums of 12 in fp32


# two experts at odds 3:1, and a third at half the second
TRUTH = [
    # top_k, norm_topk_prob, weights
    (1, True, [1.0]),
    (1, False, [6 / 9]),
    (2, True, [6 / 8, 2 / 8]),
    (2, False, [6 / 9, 2 / 9]),
    (3, True, [6 / 9, 2 / 9, 1 / 9]),
    (3, False, [6 / 9, 2 / 9, 1 / 9]),
]


@pytest.mark.parametrize(("top_k", "norm_topk_prob", "expected"), TRUTH)
@pytest.mark.parametrize("gate", [moe.gate_topk, moe.gate_topk_unfused])
def test_norm_topk_prob_truth_table(gate, top_k, norm_topk_prob, expected):
    logits = torch.tensor([[2.0, 1.0, 6.0]], dtype=torch.float64).log()
    weights, ids = gate(logits, top_k, norm_topk_prob)
    assert ids.tolist() == [[2, 0, 1][:top_k]]
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-14)  # fp64, a handful of operations


@pytest.mark.parametrize("renormalize", [False, True])
def test_fused_and_unfused_gates_agree(renormalize):
    logits = rand(64, 128, dtype=torch.float32) * 3
    fused, unfused = (gate(logits, 8, renormalize) for gate in (moe.gate_topk, moe.gate_topk_unfused))
    assert torch.equal(fused[1], unfused[1])
    torch.testing.assert_close(fused[0], unfused[0], rtol=1e-6, atol=0)  # 8 fp32 ulps: exp, sum and division


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_half_precision_weights_are_rounded_once(dtype, renormalize):
    logits = rand(16, 12, dtype=dtype)
    weights, _ = moe.gate_topk(logits, 4, renormalize)
    expected, _ = gate_by_loop(logits, 4, renormalize)
    assert weights.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(weights.double(), expected, rtol=0.51 * eps, atol=0)  # one rounding after fp32


@pytest.mark.parametrize("gate", [moe.gate_topk, moe.gate_topk_unfused])
def test_ties_go_to_the_lower_expert(gate):
    assert gate(torch.zeros(2, 200), 5, True)[1].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_finished_tokens_get_the_id_past_the_last_expert_and_go_nowhere():
    logits, finished = rand(3, 6, dtype=torch.float32), torch.tensor([False, True, False])
    for ids in (
        ops.npu_moe_gating_top_k_softmax(logits, finished, 2)[1],
        ops.npu_moe_gating_top_k_softmax_v2(logits, k=2, finished=finished)[1],
    ):
        assert ids[1].tolist() == [6, 6]
        assert torch.equal(ids[[0, 2]], gate_by_loop(logits, 2, False)[1][[0, 2]])
        _, row_idx, counts = moe.init_routing(rand(3, 4), ids, 6, (0, 6))
        assert row_idx.view(3, 2)[1].tolist() == [-1, -1]
        assert counts.sum() == 4


@pytest.mark.parametrize(("shape", "tokens"), [((5, 7), 5), ((2, 3, 7), 6)])
def test_row_idx_of_the_gate_counts_down_the_columns(shape, tokens):
    _, ids, row_idx = ops.npu_moe_gating_top_k_softmax(rand(*shape, dtype=torch.float32), None, 3)
    expected = [[j * tokens + i for j in range(3)] for i in range(tokens)]
    assert row_idx.shape == ids.shape
    assert row_idx.view(tokens, 3).tolist() == expected


def test_softmax_output_only_on_request():
    logits = rand(4, 9, dtype=torch.bfloat16)
    full = ops.npu_moe_gating_top_k_softmax_v2(logits, k=2, output_softmax=True)[2]
    expected = [[gate_one_token(row, 9, False)[0][::-1]] for row in logits.double().sort(-1).values.tolist()]
    assert full.dtype == torch.float32
    torch.testing.assert_close(
        full.sort(-1).values.double(), torch.tensor(expected, dtype=torch.float64)[:, 0], rtol=1e-6, atol=0
    )  # fp32
    for renorm, wanted in [(0, False), (1, False), (1, True)]:
        assert ops.npu_moe_gating_top_k_softmax_v2(logits, k=2, renorm=renorm, output_softmax=wanted)[2].shape == (0,)


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gating_top_k_scores_bias_renorm_and_scale(norm_type, renorm, with_bias):
    logits, bias = rand(6, 10), rand(10, seed=1) if with_bias else None
    weights, ids, full = ops.npu_moe_gating_top_k(
        logits, 3, bias=bias, renorm=renorm, norm_type=norm_type, out_flag=True, routed_scaling_factor=2.5
    )
    for token, row in enumerate(logits.tolist()):
        total = sum(math.exp(v) for v in row)
        scores = [math.exp(v) / total if norm_type == 0 else 1 / (1 + math.exp(-v)) for v in row]
        biased = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist())]
        chosen = sorted(range(10), key=lambda e: (-biased[e], e))[:3]
        divisor = sum(scores[e] for e in chosen) if renorm or norm_type == 1 else 1.0  # sigmoid: always
        assert ids[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx([2.5 * scores[e] / divisor for e in chosen], rel=1e-13)  # fp64
        assert full[token].tolist() == pytest.approx(scores, rel=1e-6)  # fp32 output
    assert ops.npu_moe_gating_top_k(logits, 3)[2].isnan().all()


def test_gating_top_k_refuses_groups_and_hashed_routing():
    for argument in ({"k_group": 2}, {"group_count": 2}, {"input_ids": torch.zeros(2)}, {"norm_type": 2}):
        with pytest.raises(NotImplementedError, match=next(iter(argument))):
            ops.npu_moe_gating_top_k(rand(2, 8), 2, **argument)
    for op in (
        ops.npu_moe_gating_top_k_softmax,
        ops.npu_moe_gating_top_k_softmax_v2,
        ops.npu_moe_gating_top_k,
    ):
        with pytest.raises(RuntimeError, match=r"k must be in 1\.\.8"):
            op(rand(2, 8), k=9)


# ---- init routing ------------------------------------------------------------------------------------------------


def buckets(ids_TK, start, end):
    """The oracle of every sort here: walk the copies in row order and drop each into its expert's queue."""
    queues = {e: [] for e in range(start, end)}
    for token, row in enumerate(ids_TK.tolist()):
        for slot, expert in enumerate(row):
            if expert in queues:
                queues[expert].append((token, slot))
    return queues


@st.composite
def routed(draw, max_tokens=7):
    """x [T, H], ids [T, K] (random, or all tokens on the same experts), E and a range of experts, maybe a silent one."""
    tokens, experts = draw(st.integers(1, max_tokens)), draw(st.integers(1, 10))
    top_k, seed = draw(st.integers(1, experts)), draw(st.integers(0, 999))
    ids = random_ids(tokens, experts, top_k, seed)
    if draw(st.booleans()):
        ids = ids[:1].expand(tokens, top_k).contiguous()
    start = draw(st.integers(0, experts - 1))
    end = draw(st.integers(start + 1, experts))
    return rand(tokens, 3, seed=seed), ids, experts, (start, end)


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


# ---- finalize routing --------------------------------------------------------------------------------------------


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


# ---- the whole block ---------------------------------------------------------------------------------------------

HIDDEN, INTERMEDIATE = 4, 3


def expert_weights(experts):
    gate_up = rand(experts, HIDDEN, 2 * INTERMEDIATE, seed=11)
    return gate_up, rand(experts, INTERMEDIATE, HIDDEN, seed=12)


def dense_moe(x, ids, weights, gate_up, down):
    """Token by token, expert by expert, nothing sorted."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token]):
            gate, up = (x[token] @ gate_up[expert]).split(INTERMEDIATE)
            out[token] += weight * ((gate * torch.sigmoid(gate) * up) @ down[expert])
    return out


def routed_moe(x, ids, weights, gate_up, down, expert_range, init, finalize):
    start, end = expert_range
    rows, row_idx, counts = init(x, ids, gate_up.shape[0], expert_range)
    hidden = matmul.swiglu(matmul.grouped_matmul(rows, gate_up[start:end], counts))
    return finalize(matmul.grouped_matmul(hidden, down[start:end], counts), weights, row_idx)


ROW = (moe.init_routing, moe.finalize_routing)
COLUMN = (moe.init_routing_column, moe.finalize_routing_column)


@settings(deadline=None, max_examples=60)
@given(routed())
def test_dense_row_column_and_expert_parallel_blocks_agree(case):
    x, ids, experts, (_, cut) = case
    x = rand(x.shape[0], HIDDEN, seed=5)
    gate_up, down = expert_weights(experts)
    weights = rand(*ids.shape, seed=6).softmax(-1)
    expected = dense_moe(x, ids, weights, gate_up, down)
    block = (x, ids, weights, gate_up, down)
    row = routed_moe(*block, (0, experts), *ROW)
    column = routed_moe(*block, (0, experts), *COLUMN)
    ranges = [(0, cut), (cut, experts)] if cut < experts else [(0, experts)]
    halves = sum(routed_moe(*block, span, *ROW) for span in ranges)  # what an all-reduce over EP ranks adds
    for out in (row, column, halves):
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)  # fp64, the order of the sums differs


def test_a_rank_none_of_whose_experts_was_chosen_adds_exact_zeros():
    x, ids = rand(3, HIDDEN), torch.tensor([[0, 1], [1, 0], [1, 2]], dtype=torch.int32)
    gate_up, down = expert_weights(6)
    out = routed_moe(x, ids, torch.ones(3, 2), gate_up, down, (3, 6), *ROW)
    assert torch.equal(out, torch.zeros_like(out))


def test_cumulative_and_pair_lists_drive_the_grouped_matmul_like_counts():
    x, ids = rand(6, HIDDEN), random_ids(6, 8, 2, seed=3) // 2 * 2  # odd experts idle
    gate_up, _ = expert_weights(8)
    outputs = []
    for kind in (0, 1, 2):
        rows, _, groups, _ = ops.npu_moe_init_routing_v2(
            x, ids, expert_num=8, expert_tokens_num_flag=True, expert_tokens_num_type=kind
        )
        outputs += ops.npu_grouped_matmul(
            [rows], [gate_up], group_list=groups, split_item=3, group_type=0, group_list_type=kind
        )
    assert not outputs[0].isnan().any()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("init", "finalize"), [(ROW[0], COLUMN[1]), (COLUMN[0], ROW[1])])
def test_mixing_the_index_families_is_wrong_without_an_error(init, finalize):
    """Documents the trap; only a single token or a single slot hides it, since j*T + i is then i*K + j."""
    x, ids, weights = rand(5, HIDDEN), random_ids(5, 6, 2, seed=1), rand(5, 2, seed=2).softmax(-1)
    gate_up, down = expert_weights(6)
    expected = dense_moe(x, ids, weights, gate_up, down)
    mixed = routed_moe(x, ids, weights, gate_up, down, (0, 6), init, finalize)
    assert (mixed - expected).abs().max() > 0.1
    one = routed_moe(x[:1], ids[:1], weights[:1], gate_up, down, (0, 6), init, finalize)
    torch.testing.assert_close(one, expected[:1], rtol=1e-11, atol=1e-12)  # fp64, the order of the sums differs


def test_no_tokens_is_a_legal_batch():
    x, ids, weights = torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2)
    gate_up, down = (w.float() for w in expert_weights(4))
    for init, finalize in (ROW, COLUMN):
        assert routed_moe(x, ids, weights, gate_up, down, (0, 4), init, finalize).shape == (0, HIDDEN)


# ---- Meta kernels and schemas ------------------------------------------------------------------------------------


def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def calls():
    """(operator, args, kwargs) over every option that can change a shape or a dtype."""
    x, ids = rand(5, 4, dtype=torch.bfloat16), random_ids(5, 6, 2, seed=0)
    for dtype, shape in itertools.product([torch.bfloat16, torch.float32], [(5, 6), (2, 3, 6)]):
        logits = rand(*shape, dtype=dtype)
        yield ops.npu_moe_gating_top_k_softmax, (logits, None, 3), {}
        for renorm, softmax in itertools.product([0, 1], [False, True]):
            options = {"k": 3, "renorm": renorm, "output_softmax": softmax}
            if logits.dim() == 2 or not softmax:  # the vendor's Meta kernel is wrong for a 3-D softmax output
                yield ops.npu_moe_gating_top_k_softmax_v2, (logits,), options
    for norm_type, out_flag in itertools.product([0, 1], [False, True]):
        options = {"norm_type": norm_type, "out_flag": out_flag}
        yield ops.npu_moe_gating_top_k, (rand(5, 6, dtype=torch.float16), 2), options
    for active_num in (2, 9):
        column = torch.arange(10, dtype=torch.int32).view(2, 5).t().contiguous()
        yield ops.npu_moe_init_routing, (x, column, ids, active_num), {}
    yield ops.npu_moe_compute_expert_tokens, (ids.flatten().sort().values, 6), {}
    for kind, flag, row_idx_type, active_num, span, scale in itertools.product(
        [0, 1, 2], [False, True], [0, 1], [-1, 3, 99], [[], [2, 5]], [None, torch.ones(5)]
    ):
        options = {
            "expert_tokens_num_type": kind,
            "expert_tokens_num_flag": flag,
            "row_idx_type": row_idx_type,
        }
        options |= {"active_num": active_num, "active_expert_range": span, "scale": scale, "expert_num": 6}
        yield ops.npu_moe_init_routing_v2, (x, ids), options
    for flag in (False, True):
        options = {"drop_pad_mode": 1, "expert_capacity": 2, "expert_num": 6, "expert_tokens_num_type": 1}
        yield ops.npu_moe_init_routing_v2, (x, ids), {**options, "expert_tokens_num_flag": flag}
    index = torch.arange(10, dtype=torch.int32)
    for mode, scales in itertools.product([0, 1, 2, 3], [torch.ones(5, 2), torch.ones(5, 2, dtype=torch.bfloat16)]):
        rows = rand(5, 2, 4, dtype=torch.bfloat16) if mode in (1, 3) else rand(10, 4, dtype=torch.bfloat16)
        yield ops.npu_moe_finalize_routing, (rows, None, None, None, scales, index, None, mode), {}


def test_meta_kernels_agree_with_the_cpu_kernels():
    for op, args, kwargs in calls():
        cpu = op(*args, **kwargs)
        meta = op(*map(on_meta, args), **{name: on_meta(value) for name, value in kwargs.items()})
        cpu, meta = ((out,) if isinstance(out, torch.Tensor) else out for out in (cpu, meta))
        described = [[(tuple(t.shape), t.dtype) for t in outputs] for outputs in (cpu, meta)]
        assert described[0] == described[1], (op, kwargs)
        assert all(t.is_meta for t in meta)


def test_documented_oddities_of_the_output_shapes():
    """Shapes and dtypes of torch_npu 2.13.0's Meta kernels that one would not guess."""
    x, ids = (
        rand(16, 8, dtype=torch.bfloat16).to("meta"),
        torch.zeros(16, 8, dtype=torch.int32, device="meta"),
    )
    without_flag = ops.npu_moe_init_routing_v2(x, ids, expert_num=128)
    assert [tuple(t.shape) for t in without_flag] == [(128, 8), (128,), (), (128,)]
    assert [t.dtype for t in without_flag] == [torch.bfloat16, torch.int32, torch.int64, torch.float32]
    pairs = {"expert_tokens_num_flag": True, "expert_tokens_num_type": 2, "active_expert_range": [0, 32]}
    assert ops.npu_moe_init_routing_v2(x, ids, expert_num=128, **pairs)[2].shape == (128, 2)
    assert ops.npu_moe_init_routing(x, ids, ids, 8)[0].shape == (64, 8)
    assert ops.npu_moe_gating_top_k_softmax_v2(x, k=2, renorm=1, output_softmax=True)[2].shape == (0,)
    assert ops.npu_moe_gating_top_k(x, 2)[2].shape == (16, 8)


def test_schemas_hold_under_opcheck():
    """No output aliases an input, nothing is mutated, and a fake tensor predicts the real one."""
    latest = {op: (args, kwargs) for op, args, kwargs in calls()}
    for op, (args, kwargs) in latest.items():
        torch.library.opcheck(op.default, args, kwargs, test_utils=("test_schema", "test_faketensor"))
