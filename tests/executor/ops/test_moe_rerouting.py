# SPDX-License-Identifier: Apache-2.0
"""Re-routing against rows laid out one by one, against init routing of all ranks' tokens, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.ops import moe
from tests.executor.ops.routing_cases import rand, random_ids

ops = torch.ops.npu


@st.composite
def counts_of(draw):
    """[N, E] counts, many of them zero, in either dtype."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    values = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=experts, max_size=experts)
    rows = draw(st.lists(values, min_size=ranks, max_size=ranks))
    return torch.tensor(rows, dtype=draw(st.sampled_from([torch.int32, torch.int64])))


def origins(counts):
    """(rank, expert, n) of every row that an all-to-all brings, in its order."""
    return [(r, e, n) for r, row in enumerate(counts.tolist()) for e, many in enumerate(row) for n in range(many)]


@settings(deadline=None, max_examples=80)
@given(counts_of(), st.booleans())
def test_rows_are_sorted_by_expert_then_rank(counts, with_scales):
    arrived = origins(counts)
    by_expert = sorted(arrived, key=lambda row: (row[1], row[0], row[2]))
    tokens = rand(len(arrived), 3, dtype=torch.bfloat16)
    scales = torch.arange(1.0, len(arrived) + 1) if with_scales else None
    out, out_scales, idx, per_expert = ops.npu_moe_re_routing(tokens, counts, per_token_scales=scales)
    assert [arrived[i] for i in idx.tolist()] == by_expert
    assert torch.equal(out, tokens[idx])
    assert torch.equal(out_scales, idx + 1.0) if with_scales else out_scales.isnan().all()
    assert per_expert.tolist() == [sum(1 for row in arrived if row[1] == e) for e in range(counts.shape[1])]
    assert per_expert.dtype == counts.dtype

    rows, source, _ = moe.re_routing(tokens, counts)
    assert torch.equal(moe.undo_re_routing(rows, source), tokens)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 999), st.data())
def test_two_routings_equal_one_over_the_tokens_of_all_ranks(ranks, local, seed, data):
    """What rank r receives and sorts is what init routing makes of everybody's tokens for r's experts."""
    experts = ranks * local
    top_k = data.draw(st.integers(1, experts))
    tokens = [data.draw(st.integers(0, 4)) for _ in range(ranks)]
    xs = [rand(n, 3, seed=seed + r) for r, n in enumerate(tokens)]
    ids = [
        random_ids(n, experts, top_k, seed + r) if n else torch.zeros(0, top_k, dtype=torch.int32)
        for r, n in enumerate(tokens)
    ]
    routed = [moe.init_routing(x, i, experts, (0, experts)) for x, i in zip(xs, ids)]
    for rank in range(ranks):
        mine = slice(rank * local, (rank + 1) * local)
        parts = [rows.split(counts.tolist())[mine] for rows, _, counts in routed]
        arrived = torch.cat([part for per_source in parts for part in per_source])
        rows, _, counts = moe.re_routing(arrived, torch.stack([counts[mine] for *_, counts in routed]))
        whole, _, expected = moe.init_routing(torch.cat(xs), torch.cat(ids), experts, (mine.start, mine.stop))
        assert torch.equal(rows, whole[: expected.sum()])
        assert torch.equal(counts, expected)


def calls():
    for counts_dtype, dtype in [(torch.int32, torch.int8), (torch.int64, torch.bfloat16), (torch.int64, torch.float64)]:
        counts = torch.tensor([[1, 0], [2, 3]], dtype=counts_dtype)
        for scales in (None, torch.ones(6), torch.ones(6, 2, dtype=torch.uint8)):
            yield (torch.arange(12).view(6, 2).to(dtype), counts), {"per_token_scales": scales}
    yield (torch.zeros(0, 4), torch.zeros(3, 2, dtype=torch.int64)), {}


def test_meta_kernel_agrees_with_the_cpu_kernel():
    for args, kwargs in calls():
        cpu = ops.npu_moe_re_routing(*args, **kwargs)
        on_meta = {key: None if value is None else value.to("meta") for key, value in kwargs.items()}
        meta = ops.npu_moe_re_routing(*(a.to("meta") for a in args), **on_meta)
        described = [[(tuple(t.shape), t.stride(), t.dtype) for t in outputs] for outputs in (cpu, meta)]
        assert described[0] == described[1], kwargs
        assert all(t.is_meta for t in meta)
        torch.library.opcheck(
            ops.npu_moe_re_routing.default, args, kwargs, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("tokens", "counts", "options", "message"),
    [
        ((5, 4), [[1, 2], [1, 2]], {}, "do not add up to 5 rows"),
        ((2, 4), [[3, -1]], {}, "do not add up to 2 rows"),
        ((2, 16384), [[1, 1]], {}, "0 < H < 16384"),
        ((2, 4), [1, 1], {}, r"must be \(ranks, experts\)"),
        ((2, 4), [[1, 1]], {"per_token_scales": torch.ones(3)}, "must have 2 rows"),
        ((2, 4), [[1, 1]], {"idx_type": 1}, "idx_type 0, not 1 and 1"),
        ((2, 4), [[1, 1]], {"expert_token_num_type": 0}, "only expert_token_num_type 1 and idx_type 0, not 0 and 0"),
    ],
)
def test_what_the_vendor_refuses(tokens, counts, options, message):
    with pytest.raises(RuntimeError, match=message):
        ops.npu_moe_re_routing(torch.zeros(tokens), torch.tensor(counts), **options)


def test_packed_tokens_are_not_computed():
    with pytest.raises(NotImplementedError, match="tokens_dtype=296"):
        ops.npu_moe_re_routing(torch.zeros(1, 4), torch.tensor([[1]]), tokens_dtype=296)
