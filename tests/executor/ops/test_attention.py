# SPDX-License-Identifier: Apache-2.0
"""Fused attention against scalar loops and torch's SDPA: masks, layouts, lengths, paged formats, no leaks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.ops import attention, kv

OPS = torch.ops.npu
FIA = OPS.npu_fused_infer_attention_score_v2
NAN = torch.nan


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loop(q, k, v, scale, sees):
    """One sequence in Python floats, masked by ``sees(i, j)``: returns out [Sq, Nq, Dv] and lse [Sq, Nq]."""
    (sq, nq, _), (length, nk, dv) = q.shape, v.shape
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    out, lse = (
        torch.full((sq, nq, dv), NAN, dtype=torch.float64),
        torch.full((sq, nq), NAN, dtype=torch.float64),
    )
    for i in range(sq):
        for h in range(nq):
            g = h * nk // nq
            scores = {j: scale * sum(a * b for a, b in zip(q[i][h], k[j][g])) for j in range(length) if sees(i, j)}
            if not scores:
                continue
            total = sum(math.exp(s) for s in scores.values())
            lse[i, h] = math.log(total)
            for d in range(dv):
                out[i, h, d] = sum(math.exp(s) / total * v[j][g][d] for j, s in scores.items())
    return out, lse


def sdpa(q, k, v, scale, causal):
    """One sequence through torch, K and V repeated for GQA; right-down causal by an explicit mask."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    keep = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[0]) if causal else None
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, attn_mask=keep, scale=scale
    ).transpose(0, 1)


def running(lengths):
    return torch.tensor(lengths).cumsum(0).tolist()


def assert_close(actual, expected, tolerance=1e-12):  # default: fp64 against fp64, a few hundred operations
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


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


class Cache:
    """Sequences of ``kv_lengths`` tokens written into random blocks; whatever was not written is NaN."""

    def __init__(self, kv_lengths, dtype, heads=2, dim=32, size=4, seed=0):
        self.row = 32 // dtype.itemsize
        self.heads, self.dim, self.size, self.lengths = heads, dim, size, kv_lengths
        needed = [-(-n // size) for n in kv_lengths]
        self.blocks = sum(needed) + 3
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        # unused entries of the table name a block that stays NaN
        self.table = torch.full((len(kv_lengths), max(needed) + 1), order[-1], dtype=torch.int32)
        self.k = [randn(n, heads, dim, dtype=dtype, seed=10 + b) for b, n in enumerate(kv_lengths)]
        self.v = [randn(n, heads, dim, dtype=dtype, seed=50 + b) for b, n in enumerate(kv_lengths)]
        slots = []
        for b, n in enumerate(needed):
            self.table[b, :n] = torch.tensor(order[:n], dtype=torch.int32)
            slots += [order[j // size] * size + j % size for j in range(kv_lengths[b])]
            order = order[n:]
        tokens = torch.cat(self.k), torch.cat(self.v)
        slots = torch.tensor(slots)
        self.norm = [torch.full((self.blocks, size, heads, dim), NAN, dtype=dtype) for _ in range(2)]
        kv.write_kv(*tokens, *self.norm, slots)
        self.nz = [
            torch.full((self.blocks, heads * dim // self.row, size, self.row), NAN, dtype=dtype) for _ in range(2)
        ]
        OPS.npu_scatter_pa_kv_cache(*tokens, *self.nz, slots)

    def as_format(self, name):
        if name == "BnBsH":
            return [c.flatten(2) for c in self.norm]
        if name == "BnNBsD":
            return [c.transpose(1, 2).contiguous() for c in self.norm]
        return [c.view(self.blocks, self.heads, self.dim // self.row, self.size, self.row) for c in self.nz]


@pytest.mark.parametrize("cache_format", ["BnBsH", "BnNBsD", "NZ"])
@pytest.mark.parametrize("layout", ["TND", "BSND", "BNSD", "BSH"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_write_then_attend_paged_equals_contiguous(cache_format, layout, dtype):
    cache, sq, nq = Cache([7, 4, 9], dtype), 3, 4
    q = randn(3, sq, nq, cache.dim, dtype=dtype)
    arrange = {"TND": q.flatten(0, 1), "BSND": q, "BNSD": q.transpose(1, 2), "BSH": q.flatten(2)}
    out, _ = FIA(
        arrange[layout],
        *cache.as_format(cache_format),
        atten_mask=attention.causal_mask("cpu"),
        actual_seq_qlen=[3, 6, 9] if layout == "TND" else None,
        actual_seq_kvlen=cache.lengths,
        block_table=cache.table,
        num_query_heads=nq,
        num_key_value_heads=2,
        softmax_scale=0.2,
        input_layout=layout,
        sparse_mode=3,
        block_size=4,
    )
    assert out.shape == arrange[layout].shape
    out = out.transpose(1, 2) if layout == "BNSD" else out.reshape(q.shape)
    for b in range(3):
        expected = sdpa(q[b].double(), cache.k[b].double(), cache.v[b].double(), 0.2, causal=True)
        tolerance = 1e-12 if dtype == torch.float64 else 2**-8  # fp64 noise, or the one rounding to bf16
        torch.testing.assert_close(out[b].double(), expected, rtol=tolerance, atol=1e-6)  # finite: no NaN leaked


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_our_paged_attention_is_causal_over_the_cache(lengths, padding, seed):
    cache = Cache([new + old for new, old in lengths], torch.float64, seed=seed)
    totals = running([new for new, _ in lengths])
    q = randn(totals[-1] + padding, 4, cache.dim, seed=seed)
    out = attention.paged_attention(
        q,
        *cache.norm,
        actual_seq_qlen=totals,
        actual_seq_kvlen=cache.lengths,
        block_table=cache.table,
        num_kv_heads=2,
        scale=0.25,
        causal_mask=attention.causal_mask("cpu"),
    )
    for b, (start, stop) in enumerate(zip([0, *totals], totals)):
        assert_close(out[start:stop], sdpa(q[start:stop], cache.k[b], cache.v[b], 0.25, causal=True))
    assert out[totals[-1] :].isnan().all()


def test_decode_without_a_mask_equals_decode_with_it():
    cache = Cache([5, 12, 1, 8], torch.bfloat16)
    q = randn(4, 4, cache.dim, dtype=torch.bfloat16)
    options = {
        "actual_seq_qlen": [1, 2, 3, 4],
        "actual_seq_kvlen": cache.lengths,
        "block_table": cache.table,
        "num_kv_heads": 2,
        "scale": 0.2,
    }
    plain = attention.paged_attention(q, *cache.norm, causal_mask=None, **options)
    assert plain.isfinite().all()
    masked = attention.paged_attention(q, *cache.norm, causal_mask=attention.causal_mask("cpu"), **options)
    assert torch.equal(plain, masked)
    with pytest.raises(ValueError, match="one query"):
        attention.paged_attention(
            q,
            *cache.norm,
            causal_mask=None,
            **(options | {"actual_seq_qlen": [1, 2, 4], "actual_seq_kvlen": [5, 12, 1]}),
        )


def test_bad_lengths_tables_and_heads_are_refused():
    cache = Cache([5, 12], torch.bfloat16)
    q = randn(2, 4, cache.dim, dtype=torch.bfloat16)
    good = {
        "actual_seq_qlen": [1, 2],
        "actual_seq_kvlen": [5, 12],
        "block_table": cache.table,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "block_size": 4,
    }
    beyond = cache.table.clone()
    beyond[1, 0] = cache.blocks
    for change, message in [
        ({"actual_seq_qlen": [2, 1]}, "never decrease"),
        ({"actual_seq_qlen": [1, 3]}, "exceed the 2 tokens"),
        ({"actual_seq_qlen": None}, "needs actual_seq_qlen"),
        ({"actual_seq_kvlen": [5, 17]}, r"actual_seq_kvlen\[1\] = 17 is not within 0..16"),
        ({"actual_seq_kvlen": None}, "needs actual_seq_kvlen"),
        ({"block_table": cache.table.long()}, "must be int32"),
        ({"block_table": cache.table[:1]}, r"\[2, max blocks\]"),
        ({"block_table": beyond}, "outside 0"),
        ({"block_size": 0}, "block_size 0"),
        ({"num_query_heads": 8}, "with 8 heads"),
        ({"num_key_value_heads": 3}, "3 KV heads must divide 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            FIA(q, *cache.as_format("BnBsH"), **(good | change))
    with pytest.raises(ValueError, match=r"must be \[Bn, 2, bs, D\]"):
        FIA(q, *cache.norm, **good)  # [Bn, bs, N, D] is not a format attention knows


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
