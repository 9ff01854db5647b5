# SPDX-License-Identifier: Apache-2.0
"""Rotary references against fp32 scalar loops (bit for bit), HF's function, and each product's rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import executor.ops.reference.rope  # noqa: F401  (registers the kernels)
from executor.ops import rope
from executor.ops.reference.product import get_product, set_product

OPS = torch.ops.npu


@pytest.fixture(autouse=True)
def _restore_product():
    before = get_product()
    yield
    set_product(before)


def angles(tokens, dim, dtype, seed):
    """cos and sin [tokens, dim / 2]; random angles, for no rule here depends on the frequencies."""
    theta = torch.rand(tokens, dim // 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 6.3
    return theta.cos().to(dtype), theta.sin().to(dtype)


def qk(tokens, dim, dtype, seed, nq=3, nk=2):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, nq, dim, generator=generator, dtype=torch.float64).to(dtype)
    return q, torch.randn(tokens, nk, dim, generator=generator, dtype=torch.float64).to(dtype)


def full_width(half, mode):
    wide = torch.cat((half, half), -1) if mode == "half" else half.repeat_interleave(2, -1)
    return wide.unsqueeze(1)


def loop(x_TND, cos, sin, mode, scalar):
    """Pair by pair with numpy scalars of type ``scalar``: every operation rounds to it, none is fused."""
    tokens, heads, dim = x_TND.shape
    x, c, s = (t.double().numpy().astype(scalar) for t in (x_TND, cos, sin))
    y = np.empty(x.shape, scalar)
    for t in range(tokens):
        for h in range(heads):
            for i in range(dim // 2):
                a, b = (i, i + dim // 2) if mode == "half" else (2 * i, 2 * i + 1)
                y[t, h, a] = x[t, h, a] * c[t, i] + -x[t, h, b] * s[t, i]
                y[t, h, b] = x[t, h, b] * c[t, i] + x[t, h, a] * s[t, i]
    return torch.from_numpy(y)


def nearest_bf16(values, tie):
    """fp32 -> bf16 by measuring the distance to both neighbours; ``tie``(low, high) decides."""
    out = []
    for v in values.flatten().tolist():
        bits = int(np.float32(v).view(np.uint32))
        low, high = (float(np.uint32(b).view(np.float32)) for b in (bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000))
        near, far = abs(v - low), abs(high - v)
        out.append(low if near < far else high if far < near else tie(low, high))
    return torch.tensor(out, dtype=torch.float64).to(torch.bfloat16).view(values.shape)


def away(low, high):
    return high  # the neighbour of larger magnitude


def even(low, high):
    return low if int(np.float32(low).view(np.uint32)) & 0x10000 == 0 else high


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 5),
    half=st.integers(1, 12),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    mode=st.sampled_from(["half", "interleave"]),
    seed=st.integers(0, 99),
)
def test_rotary_mul_is_fp32_with_one_rounding(tokens, half, dtype, mode, seed):
    q, _ = qk(tokens, 2 * half, dtype, seed)
    cos, sin = angles(tokens, 2 * half, dtype, seed)
    expected = loop(q, cos, sin, mode, np.float32).to(dtype)
    actual = OPS.npu_rotary_mul(q, full_width(cos, mode), full_width(sin, mode), mode)
    assert torch.equal(actual, expected)  # the same fp32 operations, hence no tolerance


def test_interleave_is_half_under_a_permutation_of_the_head_dim():
    q, _ = qk(4, 32, torch.bfloat16, 0)
    cos, sin = angles(4, 32, torch.bfloat16, 0)
    halves_first = torch.arange(32).view(16, 2).t().flatten()  # evens, then odds
    interleaved = OPS.npu_rotary_mul(q, full_width(cos, "interleave"), full_width(sin, "interleave"), "interleave")
    half = OPS.npu_rotary_mul(q[..., halves_first], full_width(cos, "half"), full_width(sin, "half"), "half")
    assert torch.equal(interleaved[..., halves_first], half)


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBND"])
def test_four_dim_layouts_broadcast(layout):
    batch, tokens, dim = 2, 5, 16
    q, _ = qk(batch * tokens, dim, torch.bfloat16, 1)
    cos, sin = (full_width(t, "half") for t in angles(batch * tokens, dim, torch.bfloat16, 1))
    order = ["BSND".index(axis) for axis in layout]

    def arranged(x):
        return x.view(batch, tokens, -1, dim).permute(order)

    expected = arranged(OPS.npu_rotary_mul(q, cos, sin))
    assert torch.equal(OPS.npu_rotary_mul(arranged(q), arranged(cos), arranged(sin)), expected)
    shared = [arranged(t).select(order.index(0), 0).unsqueeze(order.index(0)) for t in (cos, sin)]
    first = OPS.npu_rotary_mul(arranged(q), *shared).select(order.index(0), 0)  # one row of angles for all batches
    assert torch.equal(first, expected.select(order.index(0), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_calls_equal_hf_in_full_precision(dtype):
    q, k = qk(7, 64, dtype, 2)
    cos, sin = (full_width(t, "half") for t in angles(7, 64, dtype, 2))
    hf = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos.transpose(0, 1), sin.transpose(0, 1)
    )
    for call in (rope.rotary, rope.rotary_fused):
        for actual, expected in zip(call(q, k, cos, sin), hf):
            assert torch.equal(actual, expected[0].transpose(0, 1))  # the same three operations: no tolerance


@pytest.mark.parametrize(("product", "tie"), [("a2", away), ("a3", away), ("950", even)])
def test_fused_bf16_ties(product, tie):
    set_product(product)
    q, k = qk(40, 32, torch.bfloat16, 3)
    cos, sin = angles(40, 32, torch.bfloat16, 3)
    sin[:20] = 0  # then the result is one product of two 8-bit significands, a tie every few hundred elements
    wide = full_width(cos, "half"), full_width(sin, "half")
    fused = rope.rotary_fused(q, k, *wide)
    for actual, x in zip(fused, (q, k)):
        exact = loop(x, cos, sin, "half", np.float32)
        assert torch.equal(actual, nearest_bf16(exact, tie))
    same = all(torch.equal(a, b) for a, b in zip(fused, rope.rotary(q, k, *wide)))
    assert same == (product == "950")  # rotary_mul rounds ties to even on every product


def test_fused_keeps_infinities_and_nan():
    q = torch.tensor([[[float("inf"), float("nan"), 1.0, 1.0]]], dtype=torch.bfloat16)
    one, zero = torch.ones(1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 4, dtype=torch.bfloat16)
    y, _ = OPS.npu_apply_rotary_pos_emb(q, q, one, zero, "TND")
    # inf * 0 in the other half of each pair is NaN by IEEE rules
    assert y.flatten()[0] == float("inf")
    assert y.flatten()[1:].isnan().all()


def test_fused_fp16_rounds_every_operation():
    q, k = qk(6, 16, torch.float16, 4)
    cos, sin = angles(6, 16, torch.float16, 4)
    actual, _ = rope.rotary_fused(q, k, full_width(cos, "half"), full_width(sin, "half"))
    assert torch.equal(actual, loop(q, cos, sin, "half", np.float16))
    assert not torch.equal(actual, loop(q, cos, sin, "half", np.float32).half())


def test_fused_is_out_of_place_and_bsnd_equals_tnd():
    q, k = qk(6, 16, torch.bfloat16, 5)
    cos, sin = (full_width(t, "half") for t in angles(6, 16, torch.bfloat16, 5))
    before = q.clone(), k.clone()
    flat = OPS.npu_apply_rotary_pos_emb(q, k, cos, sin, "TND")
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    batched = OPS.npu_apply_rotary_pos_emb(*(t.unflatten(0, (2, 3)) for t in (q, k, cos, sin)), "BSND")
    for a, b in zip(flat, batched):
        assert torch.equal(a, b.flatten(0, 1))


def test_what_is_not_served_is_refused():
    q, k = qk(2, 8, torch.bfloat16, 6)
    cos, sin = (full_width(t, "half") for t in angles(2, 8, torch.bfloat16, 6))
    with pytest.raises(ValueError, match="layout 'NTD'"):
        OPS.npu_apply_rotary_pos_emb(q, k, cos, sin, "NTD")
    with pytest.raises(ValueError, match="needs 4 dims"):
        OPS.npu_apply_rotary_pos_emb(q, k, cos, sin)  # the default layout is BSND
    with pytest.raises(NotImplementedError, match="interleave"):
        OPS.npu_apply_rotary_pos_emb(q, k, cos, sin, "TND", "interleave")
    with pytest.raises(ValueError, match="rotary_mode 'quarter'"):
        OPS.npu_rotary_mul(q, cos, sin, "quarter")
    with pytest.raises(NotImplementedError, match="rotate"):
        OPS.npu_rotary_mul(q, cos, sin, "half", torch.eye(8))
    with pytest.raises(ValueError, match="head dim 8"):
        OPS.npu_rotary_mul(q, cos[..., :4], sin[..., :4])
    with pytest.raises(ValueError, match="share a dtype"):
        OPS.npu_rotary_mul(q, cos.float(), sin.float())
    with pytest.raises(ValueError, match="does not broadcast"):
        OPS.npu_rotary_mul(q[:1], cos, sin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_meta_equals_cpu(dtype):
    q, k = qk(3, 8, dtype, 7)
    cos, sin = (full_width(t, "half") for t in angles(3, 8, dtype, 7))
    on_meta = [t.to("meta") for t in (q, k, cos, sin)]
    pairs = list(zip(rope.rotary(*on_meta), rope.rotary(q, k, cos, sin)))
    pairs += zip(rope.rotary_fused(*on_meta), rope.rotary_fused(q, k, cos, sin))
    for m, c in pairs:
        assert (m.shape, m.dtype, m.device.type) == (c.shape, c.dtype, "meta")
