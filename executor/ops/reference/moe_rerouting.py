# SPDX-License-Identifier: Apache-2.0
"""Reference kernel of npu_moe_re_routing: what an all-to-all brought, from source-rank order into expert order.

Shape letters: A rows, H hidden size, N ranks, E experts of this rank.
"""

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define(
    "npu_moe_re_routing",
    "(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None,"
    " int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
)

_COUNTS, _GATHER = 1, 0  # the only expert_token_num_type and idx_type that the vendor's pages allow
_HIDDEN_BELOW = 16384  # the documented bound of H

_Quad = tuple[Tensor, Tensor, Tensor, Tensor]


def expert_order(counts_NE: Tensor) -> Tensor:
    """Rows lie by (rank, expert), ``counts_NE`` of each: the indices that bring them into the order (expert, rank)."""
    ranks, experts = counts_NE.shape
    expert_of_row = torch.arange(experts).repeat(ranks).repeat_interleave(counts_NE.flatten())
    return expert_of_row.argsort(stable=True)  # stable: the ranks keep their order within an expert


@reference("npu_moe_re_routing")
def re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> _Quad:
    """``tokens [A, H]`` lie by (rank, expert); ``expert_token_num_per_rank [N, E]`` int32 or int64 says how many of
    each, A in all; ``per_token_scales [A, ...]`` move along.

    Zero counts are served, although the op-plugin page asks for positive ones: a router leaves experts idle.
    Returns the rows by (expert, rank), the scales likewise (fp32 ``[A]`` without contents, NaN here, if there are
    none), ``permute_token_idx [A]`` int32 with ``out[p] = tokens[idx[p]]``, and the counts per expert ``[E]`` in the
    dtype of the argument. RuntimeError for shapes and modes the vendor refuses, NotImplementedError for packed dtypes.
    """
    counts_NE = expert_token_num_per_rank
    _check(tokens, counts_NE, per_token_scales, expert_token_num_type, idx_type, tokens_dtype)
    torch._check(
        bool((counts_NE >= 0).all()) and int(counts_NE.sum()) == tokens.shape[0],
        lambda: f"npu_moe_re_routing: counts {counts_NE.tolist()} do not add up to {tokens.shape[0]} rows",
    )
    idx = expert_order(counts_NE)
    scales = torch.full(tokens.shape[:1], float("nan")) if per_token_scales is None else per_token_scales[idx]
    return tokens[idx], scales, idx.to(torch.int32), counts_NE.sum(0, dtype=counts_NE.dtype)


@meta("npu_moe_re_routing")
def re_routing_meta(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> _Quad:
    counts_NE = expert_token_num_per_rank
    _check(tokens, counts_NE, per_token_scales, expert_token_num_type, idx_type, tokens_dtype)
    rows = tokens.shape[0]
    scales = tokens.new_empty(rows, dtype=torch.float32) if per_token_scales is None else per_token_scales
    return (
        tokens.new_empty(tokens.shape),
        scales.new_empty(scales.shape),
        tokens.new_empty(rows, dtype=torch.int32),
        counts_NE.new_empty(counts_NE.shape[1]),
    )


def _check(
    tokens: Tensor,
    counts_NE: Tensor,
    scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
    tokens_dtype: int | None,
) -> None:
    """Refuse what the vendor refuses and what is not computed here, as far as shapes tell."""
    name = "npu_moe_re_routing"
    if tokens_dtype is not None:
        raise NotImplementedError(f"{name} reference: {tokens_dtype=} (tokens in a packed dtype)")
    torch._check(
        expert_token_num_type == _COUNTS and idx_type == _GATHER,
        lambda: f"{name}: only expert_token_num_type 1 and idx_type 0, not {expert_token_num_type} and {idx_type}",
    )
    torch._check(
        tokens.dim() == 2 and 0 < tokens.shape[1] < _HIDDEN_BELOW,
        lambda: f"{name}: tokens {tuple(tokens.shape)} must be (A, H) with 0 < H < {_HIDDEN_BELOW}",
    )
    torch._check(
        counts_NE.dim() == 2 and counts_NE.dtype in (torch.int32, torch.int64),
        lambda: (
            f"{name}: expert_token_num_per_rank {tuple(counts_NE.shape)} of {counts_NE.dtype} must be (ranks, experts)"
            " int32 or int64"
        ),
    )
    torch._check(
        scales is None or scales.shape[:1] == tokens.shape[:1],
        lambda: f"{name}: per_token_scales must have {tokens.shape[0]} rows",
    )
