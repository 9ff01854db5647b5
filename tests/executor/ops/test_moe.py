# SPDX-License-Identifier: Apache-2.0
"""The whole MoE block against a dense per-token MoE, and the Meta kernels of every routing operator."""

import itertools

import pytest
import torch
from hypothesis import given, settings

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import matmul, moe
from tests.executor.ops.routing_cases import rand, random_ids, routed

ops = torch.ops.npu

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
        described = [[(tuple(t.shape), t.stride(), t.dtype) for t in outputs] for outputs in (cpu, meta)]
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
