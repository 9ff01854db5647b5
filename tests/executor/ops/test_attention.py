# SPDX-License-Identifier: Apache-2.0
"""Fused attention against scalar loops and torch's SDPA: masks, layouts, lengths, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.ops import attention
from tests.executor.ops.attention_cases import FIA, OPS, Cache, assert_close, loop, randn, running, sdpa


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    mode=st.sampled_from([0, 2, 3]),
    padding=st.integers(0, 2),
    fix_blind=st.booleans(),
)
def test_tnd_modes_equal_the_loop(lengths, heads, mode, padding, fix_blind):
    (nq, nk), dim, dv = heads, 6, 4
    sq, skv = [a for a, _ in lengths], [b for _, b in lengths]
    q = randn(sum(sq) + padding, nq, dim, seed=1)
    k, v = randn(sum(skv), nk, dim, seed=2), randn(sum(skv), nk, dv, seed=3)
    out, lse = FIA(
        q,
        k,
        v,
        actual_seq_qlen=running(sq),
        actual_seq_kvlen=running(skv),
        input_layout="TND",
        num_query_heads=nq,
        num_key_value_heads=nk,
        softmax_scale=0.4,
        sparse_mode=mode,
        return_softmax_lse=True,
        inner_precise=2 * fix_blind,
        atten_mask=attention.causal_mask("cpu") if mode else None,
    )
    plain_decode = max(sq) <= 1  # documented: causal modes have no effect then
    a = b = 0
    for n, m in lengths:
        rules = {0: lambda i, j: True, 2: lambda i, j: j <= i, 3: lambda i, j, n=n, m=m: j <= i + m - n}
        expected, expected_lse = loop(q[a : a + n], k[b : b + m], v[b : b + m], 0.4, rules[0 if plain_decode else mode])
        if fix_blind:  # queries that see nothing
            expected, expected_lse = expected.nan_to_num(0.0), expected_lse.nan_to_num(-torch.inf)
        assert_close(out[a : a + n], expected)
        assert_close(lse[a : a + n, :, 0], expected_lse)
        a, b = a + n, b + m
    assert out[a:].isnan().all()  # padding tokens
    assert lse[a:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize(("sq", "skv"), [(300, 300), (130, 420), (1, 500)])
def test_long_sequences_equal_sdpa_in_fp64(dtype, tolerance, sq, skv):
    q, k, v = (
        randn(sq, 4, 32, dtype=dtype),
        randn(skv, 2, 32, dtype=dtype, seed=1),
        randn(skv, 2, 32, dtype=dtype, seed=2),
    )
    out, _ = FIA(
        q,
        k,
        v,
        actual_seq_qlen=[sq],
        actual_seq_kvlen=[skv],
        input_layout="TND",
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=32**-0.5,
        sparse_mode=3,
        atten_mask=attention.causal_mask("cpu"),
    )
    expected = sdpa(q.double(), k.double(), v.double(), 32**-0.5, causal=True)
    # one rounding of the result; inside it is fp32, whose error is absolute and far below
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("lengths", [None, ([3], [5]), ([2, 4, 1], [6, 4, 3])])
@pytest.mark.parametrize("mode", [0, 3])
def test_layouts_agree(lengths, mode):
    batch, sq, skv, nq, nk, dim = 3, 4, 6, 4, 2, 8
    q, k, v = (
        randn(batch, sq, nq, dim),
        randn(batch, skv, nk, dim, seed=1),
        randn(batch, skv, nk, dim, seed=2),
    )
    q_lengths, kv_lengths = lengths or (None, None)
    shapes = {
        "BSND": (lambda x: x, lambda y: y),
        "BNSD": (lambda x: x.transpose(1, 2).contiguous(), lambda y: y.transpose(1, 2)),
        "BSH": (lambda x: x.flatten(2), lambda y: y.unflatten(2, (nq, dim))),
    }
    per_q = [sq] * batch if lengths is None else (q_lengths * batch)[:batch]
    per_kv = [skv] * batch if lengths is None else (kv_lengths * batch)[:batch]
    for layout, (arrange, restore) in shapes.items():
        out, lse = FIA(
            arrange(q),
            arrange(k),
            arrange(v),
            actual_seq_qlen=q_lengths,
            actual_seq_kvlen=kv_lengths,
            input_layout=layout,
            num_query_heads=nq,
            num_key_value_heads=nk,
            softmax_scale=0.3,
            sparse_mode=mode,
            atten_mask=attention.causal_mask("cpu") if mode else None,
            return_softmax_lse=True,
        )
        assert lse.shape == (batch, nq, sq, 1)
        for b, (n, m) in enumerate(zip(per_q, per_kv)):

            def sees(i, j, shift=m - n):
                return not mode or j <= i + shift

            expected, expected_lse = loop(q[b, :n], k[b, :m], v[b, :m], 0.3, sees)
            assert_close(restore(out)[b, :n], expected)
            assert_close(lse[b, :, :n, 0].t(), expected_lse)
            assert restore(out)[b, n:].isnan().all()


def test_v1_is_v2_under_other_names_and_scale_defaults_to_one():
    q, k, v = randn(2, 3, 4, 8), randn(2, 5, 2, 8, seed=1), randn(2, 5, 2, 8, seed=2)
    mask = attention.causal_mask("cpu")
    v2 = FIA(
        q,
        k,
        v,
        atten_mask=mask,
        actual_seq_qlen=[2, 3],
        actual_seq_kvlen=[4, 5],
        num_query_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
        sparse_mode=3,
        return_softmax_lse=True,
    )
    v1 = OPS.npu_fused_infer_attention_score(
        q,
        k,
        v,
        atten_mask=mask,
        actual_seq_lengths=[2, 3],
        actual_seq_lengths_kv=[4, 5],
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    for a, b in zip(v1, v2):
        assert_close(a, b, 0)  # the same code
    assert_close(v2[0][1], loop(q[1], k[1], v[1], 1.0, lambda i, j: j <= i + 2)[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", ["1SS", "B1SS", "11SS", "SS"])
def test_full_masks(shape, dtype):
    q, k, v = randn(2, 3, 2, 4), randn(2, 5, 2, 4, seed=1), randn(2, 5, 2, 4, seed=2)
    hidden = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[..., 0] = False  # every query sees something
    per_batch = shape == "B1SS"
    mask = {"1SS": hidden[:1], "B1SS": hidden[:, None], "11SS": hidden[:1, None], "SS": hidden[0]}[shape].to(dtype)
    out, _ = FIA(q, k, v, atten_mask=mask, num_query_heads=2, input_layout="BSND", softmax_scale=0.5)
    for b in range(2):
        rows = hidden[b if per_batch else 0].tolist()
        assert_close(out[b], loop(q[b], k[b], v[b], 0.5, lambda i, j, rows=rows: not rows[i][j])[0])


def test_two_dim_mask_is_per_batch_with_one_query():
    q, k, v = randn(2, 1, 2, 4), randn(2, 5, 2, 4, seed=1), randn(2, 5, 2, 4, seed=2)
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    out, _ = FIA(q, k, v, atten_mask=mask, num_query_heads=2, input_layout="BSND")
    for b in range(2):
        assert_close(out[b], loop(q[b], k[b], v[b], 1.0, lambda i, j, b=b: not mask[b, j])[0])


def test_compressed_mask_is_required_and_recognised():
    q = randn(4, 1, 8)
    options = {"actual_seq_qlen": [4], "actual_seq_kvlen": [4], "input_layout": "TND", "sparse_mode": 3}
    good = attention.causal_mask("cpu")
    assert good is attention.causal_mask(torch.device("cpu"))
    assert torch.equal(good, ~torch.ones(2048, 2048, dtype=torch.bool).tril())
    assert FIA(q, q, q, atten_mask=good, **options)[0].isfinite().all()
    inclusive = torch.ones_like(good).triu()
    for wrong in (
        ~good,
        good.t().contiguous(),
        inclusive,
        torch.zeros_like(good),
        torch.ones_like(good).triu(2),
    ):
        with pytest.raises(ValueError, match="strict upper triangle"):
            FIA(q, q, q, atten_mask=wrong, **options)
    with pytest.raises(ValueError, match="needs atten_mask"):
        FIA(q, q, q, **options)
    with pytest.raises(ValueError, match="2048x2048"):
        FIA(q, q, q, atten_mask=good[:4, :4], **options)
    with pytest.raises(ValueError, match="bool, int8 or uint8"):
        FIA(q, q, q, atten_mask=good.float(), **options)


def test_what_is_not_served_is_named():
    q = randn(1, 2, 1, 8, dtype=torch.bfloat16)
    tensor = torch.ones(1)
    for name, value in [
        ("query_rope", tensor),
        ("key_rope", tensor),
        ("pse_shift", tensor),
        ("dequant_scale_key", tensor),
        ("quant_scale_out", tensor),
        ("learnable_sink", tensor),
        ("key_quant_mode", 4),
        ("out_dtype", 1),
        ("sparse_mode", 4),
        ("input_layout", "NTD"),
    ]:
        with pytest.raises(NotImplementedError, match=name):
            FIA(q, q, q, **({"input_layout": "BSND"} | {name: value}))
    for name, value in [
        ("antiquant_scale", tensor),
        ("key_shared_prefix", q),
        ("actual_shared_prefix_len", [1]),
    ]:
        with pytest.raises(NotImplementedError, match=name):
            OPS.npu_fused_infer_attention_score(q, q, q, input_layout="BSND", **{name: value})
    with pytest.raises(NotImplementedError, match="one float dtype"):
        FIA(q, q.to(torch.int8), q.to(torch.int8), input_layout="BSND")


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("layout", ["TND", "BSND", "BNSD", "BSH"])
@pytest.mark.parametrize("cache_format", [None, "BnBsH", "BnNBsD", "NZ"])
def test_meta_equals_cpu(layout, cache_format, with_lse):
    cache, nq = Cache([7, 4], torch.bfloat16), 4
    arrange = {"TND": (6, nq, 32), "BSND": (2, 3, nq, 32), "BNSD": (2, nq, 3, 32), "BSH": (2, 3, nq * 32)}
    q = randn(*arrange[layout], dtype=torch.bfloat16)
    if cache_format is None:
        shape = {"TND": (8, 2, 32), "BSND": (2, 4, 2, 32), "BNSD": (2, 2, 4, 32), "BSH": (2, 4, 64)}[layout]
        tensors = [q, randn(*shape, dtype=torch.bfloat16), randn(*shape, dtype=torch.bfloat16)]
        lengths = [4, 8] if layout == "TND" else [4, 4]
    else:
        tensors, lengths = [q, *cache.as_format(cache_format)], cache.lengths
    results = []
    for device in ("meta", "cpu"):
        paging = {} if cache_format is None else {"block_table": cache.table.to(device), "block_size": 4}
        results.append(
            FIA(
                *(t.to(device) for t in tensors),
                actual_seq_qlen=[3, 6] if layout == "TND" else None,
                actual_seq_kvlen=lengths,
                num_query_heads=nq,
                num_key_value_heads=2,
                input_layout=layout,
                return_softmax_lse=with_lse,
                **paging,
            )
        )
    for m, c in zip(*results):
        assert (m.shape, m.dtype, m.device.type) == (c.shape, c.dtype, "meta")
    assert results[1][0].shape == q.shape
    lse_shape = (6, nq, 1) if layout == "TND" else (2, nq, 3, 1)
    assert results[1][1].shape == (lse_shape if with_lse else (0,))
    v1 = OPS.npu_fused_infer_attention_score(
        *(t.to("meta") for t in tensors),
        num_heads=nq,
        num_key_value_heads=2,
        input_layout=layout,
        softmax_lse_flag=with_lse,
        block_table=None if cache_format is None else cache.table.to("meta"),
    )
    assert [(t.shape, t.dtype) for t in v1] == [(t.shape, t.dtype) for t in results[1]]
