# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and the grouped matmul against scalar loops in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import matmul

ops = torch.ops.npu
MOE_FORM = {"split_item": 3, "group_type": 0}


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def silu_times(gate, up):
    return gate / (1.0 + math.exp(-gate)) * up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_is_silu_of_the_first_half_times_the_second(dtype):
    x = rand(3, 14, dtype=dtype)
    expected = [[silu_times(row[i], row[i + 7]) for i in range(7)] for row in x.double().tolist()]
    y = matmul.swiglu(x)
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    wide = dtype in (torch.float64, torch.float32)
    tolerance = 4 * eps if wide else 0.51 * eps  # exp and 3 products in dtype; or one rounding, eps/2, after fp32
    torch.testing.assert_close(y.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_swiglu_splits_the_dim_it_is_told(dim):
    x = rand(2, 4, 6)
    y = ops.npu_swiglu(x, dim)
    assert torch.equal(y.movedim(dim, -1), ops.npu_swiglu(x.movedim(dim, -1)))
    assert y.shape == ops.npu_swiglu(x.to("meta"), dim).shape


def test_swiglu_refuses_an_odd_dim():
    with pytest.raises(RuntimeError, match="dim -1 of \\(2, 7\\) must be even"):
        ops.npu_swiglu(rand(2, 7))


def rows_one_by_one(x, weight_EKN, counts, bias_EN=None):
    """The oracle: each row is told its expert and multiplied alone. NaN where no expert owns the row."""
    y = np.full((x.shape[0], weight_EKN.shape[2]), np.nan)
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(owners):
        y[row] = x[row].double().numpy() @ weight_EKN[expert].double().numpy()
        if bias_EN is not None:
            y[row] += bias_EN[expert].double().numpy()
    return torch.from_numpy(y)


def as_layout(weight_EKN, layout):
    if layout == "KN storage":
        return [weight_EKN.contiguous()]
    if layout == "NK storage":
        return [weight_EKN.transpose(1, 2).contiguous().transpose(1, 2)]
    if layout == "padded rows":
        return [torch.nn.functional.pad(weight_EKN, (0, 3))[..., : weight_EKN.shape[2]]]
    return list(weight_EKN.unbind(0))


def as_group_list(counts, kind):
    if kind == 2:
        pairs = [[e, c] for e, c in enumerate(counts) if c]
        return torch.tensor(pairs + [[0, 0]] * (len(counts) - len(pairs)), dtype=torch.int64).view(-1, 2)
    counts = torch.tensor(counts, dtype=torch.int64)
    return counts.cumsum(0) if kind == 0 else counts


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    tail=st.integers(0, 3),
    kind=st.sampled_from([0, 1, 2]),
    layout=st.sampled_from(["KN storage", "NK storage", "padded rows", "tensor per expert"]),
    with_bias=st.booleans(),
    split_item=st.sampled_from([2, 3]),
    seed=st.integers(0, 99),
)
def test_grouped_matmul_equals_rows_one_by_one(counts, tail, kind, layout, with_bias, split_item, seed):
    experts, rows = len(counts), sum(counts) + tail
    x, weight = rand(rows, 5, seed=seed), rand(experts, 5, 4, seed=seed + 1)
    bias = rand(experts, 4, seed=seed + 2) if with_bias else None
    (y,) = ops.npu_grouped_matmul(
        [x],
        as_layout(weight, layout),
        bias=None if bias is None else [bias] if layout != "tensor per expert" else list(bias.unbind(0)),
        group_list=as_group_list(counts, kind),
        split_item=split_item,
        group_type=0,
        group_list_type=kind,
    )
    expected = rows_one_by_one(x, weight, counts, bias)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13, equal_nan=True)  # fp64, sums of 5 products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["KN storage", "NK storage"])
def test_grouped_matmul_accumulates_wide_and_rounds_once(dtype, layout):
    counts, depth = [1, 0, 2, 5], 96
    x, weight = rand(8, depth, dtype=dtype), rand(4, depth, 24, dtype=dtype, seed=1)
    y = matmul.grouped_matmul(x, as_layout(weight, layout)[0], torch.tensor(counts))
    exact = rows_one_by_one(x, weight, counts)
    magnitude = rows_one_by_one(x.abs(), weight.abs(), counts)
    accumulation = depth * 2.0**-24 * magnitude  # the worst case of an fp32 sum of `depth` products, in any order
    rounding = torch.finfo(dtype).eps / 2 * (exact.abs() + accumulation)  # one rounding to dtype
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= accumulation + rounding).all()


def test_bf16_sums_do_not_stall():
    """Adding ones in bf16 stops at 256; in fp32 it reaches 384, which bf16 holds exactly."""
    x, weight = torch.ones(1, 384, dtype=torch.bfloat16), torch.ones(1, 384, 2, dtype=torch.bfloat16)
    assert matmul.grouped_matmul(x, weight, torch.tensor([1])).tolist() == [[384.0, 384.0]]


def test_bias_and_output_dtype_see_the_unrounded_sum():
    """257 is not a bf16 number: with a bias of 1 the result is 258 if the sum was not rounded (to 256) before."""
    x, weight = torch.ones(1, 257, dtype=torch.bfloat16), torch.ones(1, 257, 2, dtype=torch.bfloat16)
    groups = {"group_list": torch.tensor([1]), "group_list_type": 1, **MOE_FORM}
    (biased,) = ops.npu_grouped_matmul([x], [weight], bias=[torch.ones(1, 2)], **groups)
    assert (biased.dtype, biased.tolist()) == (torch.bfloat16, [[258.0, 258.0]])
    (wide,) = ops.npu_grouped_matmul([x], [weight], output_dtype=6, **groups)
    assert (wide.dtype, wide.tolist()) == (torch.float32, [[257.0, 257.0]])


def test_leaving_group_type_out_raises():
    with pytest.raises(RuntimeError, match="group_type only supports -1, 0 and 2"):
        ops.npu_grouped_matmul([rand(1, 2)], [rand(1, 2, 2)], group_list=torch.tensor([1]), split_item=3)


@pytest.mark.parametrize("group_list", [[1], [1, 1, 1], [2, 1], [-1, 2]])
def test_groups_that_do_not_fit_raise(group_list):
    with pytest.raises(RuntimeError, match="group_list"):
        matmul.grouped_matmul(rand(2, 3), rand(2, 3, 3), torch.tensor(group_list))


QUANTISED = {
    "scale": [torch.ones(1, 2)],
    "offset": [torch.ones(1, 2)],
    "antiquant_scale": [torch.ones(1, 2)],
    "antiquant_offset": [torch.ones(1, 2)],
    "per_token_scale": [torch.ones(1)],
    "activation_input": [torch.ones(1)],
    "activation_quant_scale": [torch.ones(1)],
    "activation_quant_offset": [torch.ones(1)],
    "act_type": 5,
    "output_dtype": 1,
    "x_dtype": 296,
    "weight_dtype": 296,
    "scale_dtype": 293,
    "per_token_scale_dtype": 293,
}


@pytest.mark.parametrize("argument", QUANTISED)
def test_quantised_arguments_are_refused_by_name(argument):
    groups = {"group_list": torch.tensor([1]), "group_list_type": 1, **MOE_FORM}
    with pytest.raises(NotImplementedError, match=rf"\b{argument}\b"):
        ops.npu_grouped_matmul([rand(1, 2)], [rand(1, 2, 2)], **groups, **{argument: QUANTISED[argument]})


def test_int8_rows_and_other_forms_are_refused():
    groups = {"group_list": torch.tensor([1]), "group_list_type": 1}
    x, weight = torch.ones(1, 2, dtype=torch.int8), torch.ones(1, 2, 2, dtype=torch.int8)
    with pytest.raises(NotImplementedError, match="int8"):
        ops.npu_grouped_matmul([x], [weight], **groups, **MOE_FORM)
    for split_item, group_type in [(0, 0), (1, 0), (3, -1), (3, 2)]:
        with pytest.raises(NotImplementedError, match=f"group_type {group_type} and split_item {split_item}"):
            ops.npu_grouped_matmul(
                [rand(1, 2)], [rand(1, 2, 2)], split_item=split_item, group_type=group_type, **groups
            )


def test_a_trainable_weight_is_accepted():
    weight = torch.nn.Parameter(rand(2, 3, 4))
    y = matmul.grouped_matmul(rand(2, 3), weight, torch.tensor([1, 1]))
    assert torch.equal(y.detach(), matmul.grouped_matmul(rand(2, 3), weight.detach(), torch.tensor([1, 1])))


@pytest.mark.parametrize("output_dtype", [None, 5, 6, 15])
@pytest.mark.parametrize("layout", ["KN storage", "NK storage", "tensor per expert"])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_grouped_matmul_meta_agrees_with_cpu(output_dtype, layout, kind):
    x, weights = rand(4, 3, dtype=torch.bfloat16), as_layout(rand(3, 3, 5, dtype=torch.bfloat16), layout)
    options = {"group_list_type": kind, "output_dtype": output_dtype, **MOE_FORM}
    groups = as_group_list([1, 0, 2], kind)
    (cpu,) = ops.npu_grouped_matmul([x], weights, group_list=groups, **options)
    (meta,) = ops.npu_grouped_matmul(
        [x.to("meta")], [w.to("meta") for w in weights], group_list=groups.to("meta"), **options
    )
    assert (meta.shape, meta.dtype) == (cpu.shape, cpu.dtype)
    assert meta.is_meta


def test_schemas_hold_under_opcheck():
    """No output aliases an input, nothing is mutated, and a fake tensor predicts the real one."""
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.npu_swiglu.default, (rand(2, 6),), test_utils=tests)
    torch.library.opcheck(
        ops.npu_grouped_matmul.default,
        ([rand(3, 4)], [rand(2, 4, 5)]),
        {"group_list": torch.tensor([1, 2]), "group_list_type": 1, **MOE_FORM},
        test_utils=tests,
    )
