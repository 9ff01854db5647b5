# SPDX-License-Identifier: Apache-2.0
"""Our calls of the MoE operators: pick experts, sort token copies by expert, bring rows to experts on other ranks, sum
them back.

The row family (v2) is what the model runs; the column family is the older chain of operators with the same
meaning. ``row_idx`` is only valid with the finalize call of its own family: the other one gives wrong sums
without an error.

Shape letters: T tokens, H hidden size, E experts, K experts per token, R = T*K expanded rows. Between ranks: N ranks,
L experts of one rank, A the most rows that can arrive at one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RENORMALIZE, PLAIN = 1, 0  # renorm of the gating operator
COUNTS = 1  # expert_tokens_num_type: rows per expert, what grouped_matmul takes
NO_DROP = 0  # drop_pad_mode of init routing: every copy is placed
NO_QUANT = -1  # quant_mode
SRC_TO_DST = 0  # row_idx_type: the position of each copy, -1 outside the expert range
COLUMN_FAMILY = 0  # drop_pad_mode of finalize routing: copy (token i, slot j) is number j*T + i
ROW_FAMILY = 2  # drop_pad_mode of finalize routing: copy (token i, slot j) is number i*K + j
GATHER = 0  # idx_type of re-routing: where each row came from
NO_SHARED_EXPERTS = 0  # shared_expert_num: the schema's default is 1


def gate_topk(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The top-k experts of each token and their softmax weights, in descending order; lower ids win ties.

    ``renormalize`` is the checkpoint's ``norm_topk_prob``: the K weights sum to one. Returns weights
    ``[T, K]`` in the logits' dtype and ids ``[T, K]`` int32.
    """
    weights_TK, ids_TK, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
        logits_TE, k=top_k, renorm=RENORMALIZE if renormalize else PLAIN
    )
    return weights_TK, ids_TK


def gate_topk_unfused(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """:func:`gate_topk` through the first gating operator and a division, where the second cannot be lowered.

    With half-precision logits the weights are rounded once more, before the sum.
    """
    weights_TK, ids_TK, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits_TE, None, top_k)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, ids_TK


def init_routing(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, expert_range: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once per selected expert of ``[lo, hi) = expert_range``, in expert order.

    Returns the copies ``[T*K, H]`` (the first ``counts.sum()`` rows; the rest is undefined), ``row_idx``
    int32 ``[T*K]`` for :func:`finalize_routing`, and the counts int64 ``[hi - lo]``.
    """
    expanded_RH, row_idx, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x_TH,
        ids_TK,
        active_num=ids_TK.numel(),
        expert_num=num_experts,
        drop_pad_mode=NO_DROP,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        quant_mode=NO_QUANT,
        active_expert_range=list(expert_range),
        row_idx_type=SRC_TO_DST,
    )
    return expanded_RH, row_idx, counts


def finalize_routing(rows_RH: Tensor, weights_TK: Tensor, row_idx: Tensor) -> Tensor:
    """Each token's weighted sum of its rows, ``[T, H]`` in their dtype; copies out of range add nothing."""
    return _finalize(rows_RH, weights_TK, row_idx, ROW_FAMILY)


def init_routing_column(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, expert_range: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`init_routing` through the older operators, for :func:`finalize_routing_column`. Full range only.

    Raises ValueError for any other ``expert_range``.
    """
    if tuple(expert_range) != (0, num_experts):
        raise ValueError(f"expert_range {expert_range}: the column family routes to all {num_experts} experts only")
    tokens, top_k = ids_TK.shape
    column_TK = torch.arange(tokens * top_k, dtype=torch.int32, device=x_TH.device).view(top_k, tokens).t()
    expanded_RH, row_idx, sorted_ids = torch.ops.npu.npu_moe_init_routing(x_TH, column_TK.contiguous(), ids_TK, tokens)
    ends_E = torch.ops.npu.npu_moe_compute_expert_tokens(sorted_ids, num_experts).long()
    return expanded_RH, row_idx, torch.diff(ends_E, prepend=ends_E.new_zeros(1))


def finalize_routing_column(rows_RH: Tensor, weights_TK: Tensor, row_idx: Tensor) -> Tensor:
    """:func:`finalize_routing` for the ``row_idx`` of :func:`init_routing_column`."""
    return _finalize(rows_RH, weights_TK, row_idx, COLUMN_FAMILY)


def _finalize(rows_RH: Tensor, weights_TK: Tensor, row_idx: Tensor, drop_pad_mode: int) -> Tensor:
    # the operator's page wants the weights in the rows' dtype, and its optional tensors have no defaults
    weights_TK = weights_TK.to(rows_RH.dtype)
    return torch.ops.npu.npu_moe_finalize_routing(
        rows_RH, None, None, None, weights_TK, row_idx, None, drop_pad_mode=drop_pad_mode
    )


def re_routing(rows_AH: Tensor, counts_NL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that an all-to-all brought, sorted by (source rank, expert), into the order (expert, source rank).

    ``counts_NL`` int64: how many rows each rank sent for each expert, A in all. Returns the rows, ``source`` int32
    ``[A]``, the place that each of them had before, for :func:`undo_re_routing`, and the counts per expert int64
    ``[L]``.
    """
    sorted_AH, _, source, counts_L = torch.ops.npu.npu_moe_re_routing(
        rows_AH, counts_NL, expert_token_num_type=COUNTS, idx_type=GATHER
    )
    return sorted_AH, source, counts_L


def undo_re_routing(rows_AH: Tensor, source: Tensor) -> Tensor:
    """Rows in expert order back to their places before :func:`re_routing`."""
    return torch.empty_like(rows_AH).index_copy_(0, source.long(), rows_AH)


@dataclass(frozen=True)
class ExpertRanks:
    """Between whom the fused kernels exchange rows: rank r of ``size`` has the r-th ``num_experts / size`` experts.

    ``group`` is the communicator's name, and no other operator may use that communicator; ``tokens`` is how many each
    rank has, the same for all.
    """

    group: str
    size: int
    rank: int
    num_experts: int
    tokens: int

    def positional(self) -> tuple[str, int, int, int]:
        return self.group, self.size, self.rank, self.num_experts

    def keywords(self) -> dict[str, int]:
        return {"shared_expert_num": NO_SHARED_EXPERTS, "global_bs": self.size * self.tokens}


@dataclass(frozen=True)
class Route:
    """What dispatch tells combine. The contents depend on the product: only to be handed on."""

    assist: Tensor
    counts: Tensor
    weights: Tensor | None


def distribute_dispatch(
    x_TH: Tensor, ids_TK: Tensor, active_T: Tensor, ranks: ExpertRanks, weights_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Route]:
    """Send each active token to the ranks of its experts: bool ``active_T`` has the true ones first.

    ``weights_TK`` travel along where the kernels want them to (A2), else None. Returns the rows that arrived, in expert
    order, ``[A, H]`` with ``A = N * T * min(L, K)`` (the first ``counts.sum()`` rows; the rest is undefined), the
    counts int64 ``[L]``, and what :func:`distribute_combine` needs.
    """
    rows_AH, _, assist, counts_L, recv_counts, _, expand_weights = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x_TH,
        ids_TK,
        *ranks.positional(),
        x_active_mask=active_T,
        expert_scales=None if weights_TK is None else weights_TK.float(),
        expert_token_nums_type=COUNTS,
        **ranks.keywords(),
    )
    return rows_AH, counts_L, Route(assist, recv_counts, None if weights_TK is None else expand_weights)


def distribute_combine(
    rows_AH: Tensor, ids_TK: Tensor, weights_TK: Tensor, active_T: Tensor, ranks: ExpertRanks, route: Route
) -> Tensor:
    """Bring the rows of :func:`distribute_dispatch` back: each token's weighted sum ``[T, H]`` in their dtype, zero for
    tokens that are not active. The other arguments are those of the dispatch."""
    # the kernel takes the weights in fp32 whatever the rows are; only the reference has fp64
    weights_TK = weights_TK if rows_AH.dtype == torch.float64 else weights_TK.float()
    return torch.ops.npu.npu_moe_distribute_combine_v2(
        rows_AH,
        ids_TK,
        route.assist,
        route.counts,
        weights_TK,
        *ranks.positional(),
        x_active_mask=active_T,
        expand_scales=route.weights,
        **ranks.keywords(),
    )


def distribute_combine_add_rms_norm(
    rows_AH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    active_T: Tensor,
    ranks: ExpertRanks,
    route: Route,
    residual_TH: Tensor,
    gamma: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """:func:`distribute_combine` and the norm after it in one kernel, for Atlas A3: ``(norm(x), x)`` of ``x``, the
    weighted sums added to ``residual_TH``, both ``[T, H]``."""
    weights_TK = weights_TK if rows_AH.dtype == torch.float64 else weights_TK.float()
    y, _, total = torch.ops.npu.npu_moe_distribute_combine_add_rms_norm(
        rows_AH,
        ids_TK,
        route.assist,
        route.counts,
        weights_TK,
        residual_TH.unsqueeze(1),
        gamma,
        *ranks.positional(),
        x_active_mask=active_T,
        expand_scales=route.weights,
        norm_eps=eps,
        **ranks.keywords(),
    )
    return y.squeeze(1), total.squeeze(1)
