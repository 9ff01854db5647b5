# SPDX-License-Identifier: Apache-2.0
"""What MoE dispatch and combine refuse, and their shapes: all that one process shows. The exchange between ranks is in
``tests/multirank/test_moe_operators.py``."""

import pytest
import torch

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import moe
from tests.executor.ops.routing_cases import rand, random_ids

ops = torch.ops.npu

HIDDEN = 3
ONE = ("", 1, 0, 6)  # no group, one rank, its number, experts


def inputs(tokens=3, top_k=2):
    return rand(tokens, HIDDEN), random_ids(tokens, 6, top_k, seed=0)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"quant_mode": 2}, "quant_mode"),
        ({"scales": torch.ones(6, HIDDEN)}, "scales"),
        ({"shared_expert_rank_num": 1}, "shared_expert_rank_num"),
        ({"zero_expert_num": 1}, "zero_expert_num"),
        ({"copy_expert_num": 1}, "copy_expert_num"),
        ({"const_expert_num": 1}, "const_expert_num"),
        ({"tp_world_size": 2}, "tp_world_size"),
        ({"group_tp": "tp"}, "group_tp"),
        ({"comm_alg": "hierarchy"}, "comm_alg"),
        ({"y_dtype": 0}, "y_dtype"),
        ({"elastic_info": torch.zeros(1, dtype=torch.int32)}, "elastic_info"),
    ],
)
def test_dispatch_says_what_it_does_not_compute(options, argument):
    with pytest.raises(NotImplementedError, match=f"argument {argument}"):
        ops.npu_moe_distribute_dispatch_v2(*inputs(), *ONE, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x_active_mask": torch.tensor([True, False, True])}, "must come first"),
        ({"x_active_mask": torch.ones(2, dtype=torch.bool)}, r"bool \(T,\) or \(T, K\)"),
        ({"x_active_mask": torch.ones(3)}, r"bool \(T,\) or \(T, K\)"),
        ({"expert_scales": torch.ones(3, 2, dtype=torch.float64)}, "expert_scales must be fp32"),
        ({"expert_token_nums_type": 2}, "must be 0 or 1"),
        ({"shared_expert_num": 2}, "shared_expert_num=2 without ranks"),
        ({"global_bs": 2}, "does not fit their tokens"),
    ],
)
def test_dispatch_refuses_what_the_vendor_does(options, message):
    with pytest.raises(RuntimeError, match=message):
        ops.npu_moe_distribute_dispatch_v2(*inputs(), *ONE, **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 0]], "must differ"),
        ([[0, 6]], r"must lie in 0\.\.5"),
        ([[-1, 0]], r"must lie in 0\.\.5"),
        ([[0, 1], [2, 3]], r"x \(1, 3\)"),
        ([[0, 1, 2, 3, 4, 5, 6]], "0 < K <= 6"),
    ],
)
def test_dispatch_refuses_ids_that_no_router_gives(ids, message):
    with pytest.raises(RuntimeError, match=message):
        ops.npu_moe_distribute_dispatch_v2(rand(1, HIDDEN), torch.tensor(ids, dtype=torch.int32), *ONE)


def test_ids_that_take_no_part_may_be_anything():
    x, ids = rand(2, HIDDEN), torch.tensor([[4, 1], [9, 9]], dtype=torch.int32)
    mask = torch.tensor([True, False])
    rows = ops.npu_moe_distribute_dispatch_v2(x, ids, *ONE, x_active_mask=mask)[0]
    assert torch.equal(rows[:2], x[[0, 0]])
    assert rows[2:].isnan().all()


def test_experts_must_divide_over_the_ranks():
    with pytest.raises(RuntimeError, match="ep_world_size=4, which must divide moe_expert_num=6"):
        ops.npu_moe_distribute_dispatch_v2(*inputs(), "g", 4, 0, 6)


def test_combine_refuses_what_is_not_of_one_dispatch():
    x, ids = inputs()
    rows, _, assist, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(x, ids, *ONE)
    weights, mask = torch.ones(3, 2), torch.tensor([True, True, False])
    with pytest.raises(RuntimeError, match="not of one dispatch"):
        ops.npu_moe_distribute_combine_v2(rows, ids, assist, counts, weights, *ONE, x_active_mask=mask)
    with pytest.raises(RuntimeError, match=r"must be \(6, H\) and 768 for this global_bs"):
        ops.npu_moe_distribute_combine_v2(rows[:5], ids, assist, counts, weights, *ONE)
    with pytest.raises(RuntimeError, match=r"must be \(8, H\) and 1024 for this global_bs"):
        ops.npu_moe_distribute_combine_v2(rows, ids, assist, counts, weights, *ONE, global_bs=4)
    with pytest.raises(RuntimeError, match="expert_scales must be fp32"):
        ops.npu_moe_distribute_combine_v2(rows, ids, assist, counts, weights.bfloat16(), *ONE)
    with pytest.raises(NotImplementedError, match="argument comm_quant_mode"):
        ops.npu_moe_distribute_combine_v2(rows, ids, assist, counts, weights, *ONE, comm_quant_mode=2)


def test_a_weight_of_a_token_that_takes_no_part_is_not_read():
    x, ids = inputs()
    ranks = moe.ExpertRanks("", 1, 0, 6, 3)
    active = torch.tensor([True, True, False])
    rows, _, route = moe.distribute_dispatch(x, ids, active, ranks)
    weights = torch.ones(3, 2, dtype=torch.float64)
    weights[2] = float("nan")
    out = moe.distribute_combine(rows, ids, weights, active, ranks, route)
    assert torch.equal(out, 2 * x * active.unsqueeze(1))  # each of the two experts gives the row back


def test_shapes_at_sixteen_ranks():
    """What torch_npu 2.13.0's Meta kernel says of 16 tokens, 8 of 128 experts each, before the 950 series."""
    x = torch.empty(16, 2048, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(16, 8, dtype=torch.int32, device="meta")
    weights = torch.empty(16, 8, device="meta")
    expected = [(2048, 2048), (2048,), (2048 * 128,), (8,), (128,), (0,), (0,)]
    out = ops.npu_moe_distribute_dispatch_v2(x, ids, "g", 16, 0, 128)
    assert [tuple(t.shape) for t in out] == expected
    out = ops.npu_moe_distribute_dispatch_v2(x, ids, "g", 16, 0, 128, expert_scales=weights, global_bs=16 * 16)
    assert [tuple(t.shape) for t in out] == [*expected[:4], (128 + 2 * 256 * 8 * 2,), (0,), (2048,)]
    dtypes = [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.int32, torch.int32, torch.float32]
    assert [t.dtype for t in out] == dtypes


def test_schemas_hold_under_opcheck():
    """No output aliases an input, nothing is mutated, and a fake tensor predicts the real one."""
    utils = ("test_schema", "test_faketensor")
    x, ids = inputs()
    options = {"x_active_mask": torch.tensor([True, True, False]), "shared_expert_num": 0}
    torch.library.opcheck(ops.npu_moe_distribute_dispatch_v2.default, (x, ids, *ONE), options, test_utils=utils)
    rows, _, assist, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(x, ids, *ONE, **options)
    back = (rows, ids, assist, counts, torch.ones(3, 2), *ONE)
    torch.library.opcheck(ops.npu_moe_distribute_combine_v2.default, back, options, test_utils=utils)
