# SPDX-License-Identifier: Apache-2.0
"""The router operators against softmax and top-k of one token at a time, in Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import moe
from tests.executor.ops.routing_cases import rand

ops = torch.ops.npu


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
