# SPDX-License-Identifier: Apache-2.0
"""RMSNorm references against fp64 loops, against HF's formula, and on both products' rounding points."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import executor.ops.reference.norm  # noqa: F401  (registers the kernels)
from executor.ops import norm
from executor.ops.reference.product import get_product, set_product

EPS = 1e-6
# largest relative error of one rounding to nearest, and half the spacing of subnormals
ROUNDOFF = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float32: (2.0**-24, 0.0),
}
OPS = torch.ops.npu


@pytest.fixture(autouse=True)
def _restore_product():
    before = get_product()
    yield
    set_product(before)


def tensors(shape, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x1 = torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(dtype)
    x2 = torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(dtype)
    gamma = (1 + 0.3 * torch.randn(width, generator=generator, dtype=torch.float64)).to(dtype)
    return x1, x2, gamma


def exact_norm(x, gamma, eps=EPS):
    """Row by row in Python floats (fp64): no rounding that an fp32 result could notice."""
    rows, rstds = [], []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        rstd = 1 / math.sqrt(math.fsum(a * a for a in row) / len(row) + eps)
        rstds.append(rstd)
        rows.append([a * rstd * g for a, g in zip(row, gamma.double().tolist())])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape), torch.tensor(rstds, dtype=torch.float64)


def hf_norm(x, gamma):
    layer = Qwen3RMSNorm(gamma.numel(), EPS).to(x.dtype)
    layer.weight.data.copy_(gamma)
    return layer(x).detach()


def roundings(actual, exact):
    """The largest error, in units of one rounding to the dtype of ``actual``."""
    relative, absolute = ROUNDOFF[actual.dtype]
    unit = (relative * exact.abs() + absolute).clamp_min(1e-300)  # an exact zero must come out as zero
    return ((actual.double() - exact).abs() / unit).max().item()


SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3)
LOW = st.sampled_from([torch.float16, torch.bfloat16])


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, width=st.integers(1, 96), dtype=LOW, fp32_gamma=st.booleans(), seed=st.integers(0, 99))
def test_rms_norm_rounds_once(shape, width, dtype, fp32_gamma, seed):
    x, _, gamma = tensors(shape, width, dtype, seed)
    gamma = gamma.float() * 1.001 if fp32_gamma else gamma
    y, rstd = OPS.npu_rms_norm(x, gamma, EPS)
    exact, exact_rstd = exact_norm(x, gamma)
    assert roundings(y, exact) <= 1.01  # one rounding, plus fp32 noise that is 2^-13 of it at most for fp16
    assert rstd.shape == (*shape, 1)
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(rstd.double().flatten(), exact_rstd, rtol=1e-6, atol=0)  # a few fp32 roundings


def test_hf_formula_would_fail_the_single_rounding_bound():
    x, _, gamma = tensors((64,), 128, torch.bfloat16, 0)
    assert roundings(hf_norm(x, gamma), exact_norm(x, gamma)[0]) > 1.1  # HF rounds x * rstd as well


def test_rms_norm_in_fp32_and_over_several_dims():
    x, _, gamma = tensors((3, 4), 32, torch.float32, 1)
    y, _ = OPS.npu_rms_norm(x, gamma, EPS)
    assert roundings(y, exact_norm(x, gamma)[0]) < 16  # mean, sqrt and two products in fp32
    wide = torch.rand(4, 32, generator=torch.Generator().manual_seed(2)) + 0.5
    y, rstd = OPS.npu_rms_norm(x, wide, EPS)
    assert rstd.shape == (3, 1, 1)
    exact = exact_norm(x.flatten(1), wide.flatten())[0].view_as(x)
    assert roundings(y, exact) < 16  # as above


@settings(deadline=None, max_examples=40)
@given(
    shape=SHAPES,
    width=st.integers(1, 160),
    dtype=LOW,
    product=st.sampled_from(["a2", "a3"]),
    seed=st.integers(0, 99),
)
def test_add_rms_norm_on_a2_a3_is_hf_bit_for_bit(shape, width, dtype, product, seed):
    set_product(product)
    x1, x2, gamma = tensors(shape, width, dtype, seed)
    y, rstd, total = OPS.npu_add_rms_norm(x1, x2, gamma, EPS)
    assert torch.equal(total, x1 + x2)
    assert torch.equal(y, hf_norm(x1 + x2, gamma))  # same chain of roundings, hence no tolerance
    exact_rstd = exact_norm(x1 + x2, gamma)[1]  # of the ROUNDED sum
    torch.testing.assert_close(rstd.double().flatten(), exact_rstd, rtol=1e-6, atol=0)  # a few fp32 roundings


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, width=st.integers(1, 96), dtype=LOW, seed=st.integers(0, 99))
def test_add_rms_norm_on_950_rounds_once(shape, width, dtype, seed):
    set_product("950")
    x1, x2, gamma = tensors(shape, width, dtype, seed)
    y, rstd, total = OPS.npu_add_rms_norm(x1, x2, gamma, EPS)
    exact, exact_rstd = exact_norm(x1.double() + x2.double(), gamma)
    # cancellation in the fp32 sum is exact for these magnitudes, so one rounding plus fp32 noise remains
    assert roundings(y, exact) <= 1.01
    assert roundings(total, x1.double() + x2.double()) <= 1.01  # one rounding after that of fp32
    torch.testing.assert_close(rstd.double().flatten(), exact_rstd, rtol=1e-6, atol=0)  # a few fp32 roundings


def test_products_differ_where_documented():
    x1, x2, gamma = tensors((64,), 128, torch.bfloat16, 3)
    results = {}
    for product in ("a2", "a3", "950"):
        set_product(product)
        results[product] = OPS.npu_add_rms_norm(x1, x2, gamma, EPS), OPS.npu_rms_norm(x1, gamma, EPS)
    for a, b in zip(results["a2"][0], results["a3"][0]):
        assert torch.equal(a, b)
    (y_a3, rstd_a3, total_a3), plain_a3 = results["a3"]
    (y_950, rstd_950, total_950), plain_950 = results["950"]
    assert torch.equal(total_a3, total_950)
    assert not torch.equal(y_a3, y_950)
    assert not torch.equal(rstd_a3, rstd_950)
    assert torch.equal(plain_a3[0], plain_950[0])


@pytest.mark.parametrize("product", ["a2", "a3", "950"])
def test_cast_gives_more_digits_on_950_only(product):
    set_product(product)
    x1, x2, gamma = tensors((16,), 64, torch.bfloat16, 4)
    wide, y, rstd, total = OPS.npu_add_rms_norm_cast(x1, x2, gamma, EPS)
    for a, b in zip((y, rstd, total), OPS.npu_add_rms_norm(x1, x2, gamma, EPS)):
        assert torch.equal(a, b)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(torch.bfloat16), y)
    assert torch.equal(wide, y.float()) == (product != "950")
    if product == "950":
        assert roundings(wide, exact_norm(x1.double() + x2.double(), gamma)[0]) < 16  # fp32 operations


@pytest.mark.parametrize("product", ["a3", "950"])
def test_in_place_and_functional_forms_agree(product):
    set_product(product)
    x1, x2, gamma = tensors((5,), 64, torch.bfloat16, 5)
    y, rstd, total = OPS.npu_add_rms_norm(x1, x2, gamma, EPS)
    before = x1.clone(), x2.clone()
    functional = OPS.npu_add_rms_norm_v2_functional(x1, x2, gamma, EPS)
    assert torch.equal(x1, before[0])
    assert torch.equal(x2, before[1])
    assert torch.equal(OPS.npu_add_rms_norm_v2(x1, x2, gamma, EPS), rstd)
    for a, b, c in zip(functional, (rstd, y, total), (rstd, x1, x2)):
        assert torch.equal(a, b)
        assert torch.equal(b, c)


@pytest.mark.parametrize("product", ["a3", "950"])
def test_fp64_extension_is_computed_in_fp64(product):
    set_product(product)
    x1, x2, gamma = tensors((6,), 48, torch.float64, 6)
    wide, y, rstd, total = OPS.npu_add_rms_norm_cast(x1, x2, gamma, EPS)
    assert {t.dtype for t in (wide, y, rstd, total)} == {torch.float64}
    exact, exact_rstd = exact_norm(x1 + x2, gamma)
    torch.testing.assert_close(y, exact, rtol=1e-14, atol=0)  # a few fp64 roundings
    torch.testing.assert_close(rstd.flatten(), exact_rstd, rtol=1e-14, atol=0)  # the same
    torch.testing.assert_close(
        OPS.npu_rms_norm(x1, gamma, EPS)[0], exact_norm(x1, gamma)[0], rtol=1e-14, atol=0
    )  # same


def test_our_calls_pick_the_outputs_in_order():
    x, residual, gamma = tensors((4,), 32, torch.bfloat16, 7)
    assert torch.equal(norm.rms_norm(x, gamma, EPS), OPS.npu_rms_norm(x, gamma, EPS)[0])
    y, new_residual = norm.add_rms_norm(x, residual, gamma, EPS)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(y, hf_norm(x + residual, gamma))
    y_fp32, y_low, new_residual = norm.add_rms_norm_cast(x, residual, gamma, EPS)
    assert y_fp32.dtype == torch.float32
    assert torch.equal(y_low, y)
    assert torch.equal(new_residual, x + residual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name",
    [
        "npu_rms_norm",
        "npu_add_rms_norm",
        "npu_add_rms_norm_cast",
        "npu_add_rms_norm_v2",
        "npu_add_rms_norm_v2_functional",
    ],
)
def test_meta_equals_cpu(name, dtype):
    x1, x2, gamma = tensors((2, 3), 16, dtype, 8)
    args = (x1, gamma) if name == "npu_rms_norm" else (x1, x2, gamma)
    on_meta = getattr(OPS, name)(*(t.to("meta") for t in args), EPS)
    on_cpu = getattr(OPS, name)(*args, EPS)
    one = isinstance(on_cpu, torch.Tensor)
    for m, c in zip((on_meta,) if one else on_meta, (on_cpu,) if one else on_cpu):
        assert (m.shape, m.dtype, m.device.type) == (c.shape, c.dtype, "meta")


def test_bad_gamma_is_refused():
    x1, x2, gamma = tensors((4,), 32, torch.bfloat16, 9)
    with pytest.raises(ValueError, match="trailing dims"):
        OPS.npu_rms_norm(x1, gamma[:16], EPS)
    with pytest.raises(ValueError, match=r"gamma is torch\.float16"):
        OPS.npu_rms_norm(x1, gamma.half(), EPS)
    with pytest.raises(ValueError, match=r"gamma is torch\.float32"):
        OPS.npu_add_rms_norm(x1, x2, gamma.float(), EPS)
    with pytest.raises(ValueError, match="must agree"):
        OPS.npu_add_rms_norm(x1, x2[:2], gamma, EPS)
