# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache: every format equals contiguous attention, no unwritten slot leaks, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.ops import attention
from tests.executor.ops.attention_cases import FIA, Cache, assert_close, randn, running, sdpa


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
