# SPDX-License-Identifier: Apache-2.0
"""Reference kernel of npu_moe_distribute_dispatch_v2: rows to the ranks of their experts, in one operator.

fp32 and fp64 rows are accepted beyond the vendor's bf16 and fp16. What a device leaves uninitialised is poisoned: NaN
in floating outputs, -1 in integer ones.

Shape letters: T tokens of this rank, K choices per token, H hidden size, L experts per rank, A the most rows that can
arrive at a rank, n the rows that did.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from executor.ops.reference.moe_distribute import (
    ASSIST,
    all_to_all,
    check_choices,
    check_ranks,
    chosen,
    most_rows,
    process_group,
    refuse,
)
from executor.ops.reference.moe_rerouting import expert_order
from executor.ops.schemas import define, meta, reference

define(
    "npu_moe_distribute_dispatch_v2",
    "(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *,"
    " Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None,"
    ' Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0,'
    " int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0,"
    ' int global_bs=0, int expert_token_nums_type=1, str comm_alg="", int zero_expert_num=0,'
    " int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)

_PREFIX_SUMS, _COUNTS = 0, 1  # expert_token_nums_type
_NAME = "npu_moe_distribute_dispatch_v2"

_Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@reference(_NAME)
def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **unsupported: object,
) -> _Seven:
    """``x [T, H]``, ``expert_ids [T, K]`` int32, different ones per token; ``x_active_mask`` bool ``[T]`` with the
    true ones first, or ``[T, K]``; ``global_bs``: the ranks times the largest T of them, 0 if all have the same T.
    A mask may only hold a false if all have the same T. A rank may have no tokens (the vendor wants one at least).
    Rank r owns the r-th L experts. Returns:

    - ``expand_x [A, H]``: the rows of this rank's experts, by (expert, source rank, token), NaN after the n-th, where
      ``A = global_bs * min(L, K)``;
    - ``dynamic_scales [A]`` fp32, no contents without quantisation;
    - ``assist_info_for_combine [A * 128]`` int32, opaque;
    - ``expert_token_nums [L]`` int64: prefix sums (type 0) or counts (type 1);
    - ``ep_recv_counts [ranks * L]`` int32: prefix sums over (expert, source rank), longer with ``expert_scales``;
    - ``tp_recv_counts [0]`` int32;
    - ``expand_scales [A]`` fp32: ``expert_scales`` in the order of the rows; ``[0]`` without them.

    RuntimeError for what the vendor refuses, NotImplementedError for quantisation, shared and constant experts and
    tensor-parallel groups.
    """
    refuse(_NAME, unsupported)
    most, local = _check_dispatch(
        x, expert_ids, x_active_mask, expert_scales, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num,
        global_bs, expert_token_nums_type,
    )  # fmt: skip
    group, top_k = process_group(group_ep, ep_world_size, ep_rank_id), expert_ids.shape[1]
    chosen_TK = chosen(_NAME, expert_ids, x_active_mask, moe_expert_num)
    _check_agreement(x.shape[0], bool(chosen_TK.all()), global_bs, ep_world_size, group)

    flat = chosen_TK.flatten().nonzero().squeeze(1)  # copy (token i, choice j) is number i*K + j
    experts, order = expert_ids.flatten()[flat].long().sort(stable=True)
    flat = flat[order]
    leaving = torch.bincount(experts, minlength=moe_expert_num).view(ep_world_size, local)
    arriving = all_to_all(leaving, [1] * ep_world_size, [1] * ep_world_size, group)  # [source rank, own expert]
    send, receive = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    by_expert = expert_order(arriving)

    def exchange(values: Tensor) -> Tensor:
        return all_to_all(values, send, receive, group)[by_expert]

    origin = torch.stack((torch.full_like(flat, ep_rank_id), flat // top_k, flat % top_k), 1)
    assist = torch.full((most, ASSIST), -1, dtype=torch.int32)
    assist[: by_expert.numel(), : origin.shape[1]] = exchange(origin)
    counts = arriving.sum(0)
    recv_counts = torch.full((_recv_counts(x, expert_ids, expert_scales, ep_world_size, local, global_bs),), -1)
    recv_counts[: arriving.numel()] = arriving.t().flatten().cumsum(0)
    none = x.new_empty(0, dtype=torch.float32)
    return (
        _padded(exchange(x[flat // top_k]), most),
        torch.full((most,), math.nan),
        assist.flatten(),
        counts.cumsum(0) if expert_token_nums_type == _PREFIX_SUMS else counts,
        recv_counts.to(torch.int32),
        none.to(torch.int32),
        none if expert_scales is None else _padded(exchange(expert_scales.flatten()[flat]), most),
    )


@meta(_NAME)
def dispatch_meta(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **unsupported: object,
) -> _Seven:
    refuse(_NAME, unsupported)
    most, local = _check_dispatch(
        x, expert_ids, x_active_mask, expert_scales, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num,
        global_bs, expert_token_nums_type,
    )  # fmt: skip
    return (
        x.new_empty(most, x.shape[1]),
        x.new_empty(most, dtype=torch.float32),
        x.new_empty(most * ASSIST, dtype=torch.int32),
        x.new_empty(local, dtype=torch.int64),
        x.new_empty(_recv_counts(x, expert_ids, expert_scales, ep_world_size, local, global_bs), dtype=torch.int32),
        x.new_empty(0, dtype=torch.int32),
        x.new_empty(0 if expert_scales is None else most, dtype=torch.float32),
    )


def _check_agreement(
    tokens: int, all_chosen: bool, global_bs: int, ep_world_size: int, group: dist.ProcessGroup | None
) -> None:
    """What the ranks have to agree on: ``global_bs``, and that with unequal T nothing is masked out."""
    mine = torch.tensor([tokens, all_chosen, global_bs])
    every = mine.new_empty(ep_world_size, 3)
    if group is None:
        every[0] = mine
    else:
        dist.all_gather_single(every.view(-1), mine, group=group)
    most, equal = int(every[:, 0].max()), bool((every[:, 0] == tokens).all())
    torch._check(
        bool((every[:, 2] == global_bs).all()) and (equal if global_bs == 0 else global_bs >= most * ep_world_size),
        lambda: (
            f"{_NAME}: global_bs {every[:, 2].tolist()} of the ranks does not fit their tokens {every[:, 0].tolist()}"
        ),
    )
    torch._check(
        equal or bool(every[:, 1].all()),
        lambda: f"{_NAME}: ranks have {every[:, 0].tolist()} tokens, so x_active_mask must be true everywhere",
    )


def _padded(values: Tensor, rows: int) -> Tensor:
    out = values.new_full((rows, *values.shape[1:]), math.nan)
    out[: values.shape[0]] = values
    return out


def _recv_counts(
    x: Tensor, expert_ids: Tensor, expert_scales: Tensor | None, ep_world_size: int, local: int, global_bs: int
) -> int:
    """Length of ep_recv_counts. With the scales there is room for partial sums of each server, of 8 ranks (A2)."""
    length = ep_world_size * local
    if expert_scales is not None:
        length += 2 * (global_bs or x.shape[0] * ep_world_size) * expert_ids.shape[1] * (ep_world_size // 8)
    return length


def _check_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    x_active_mask: Tensor | None,
    expert_scales: Tensor | None,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    shared_expert_num: int,
    global_bs: int,
    expert_token_nums_type: int,
) -> tuple[int, int]:
    """Refuse what shapes and numbers alone tell; return (A, L)."""
    local = check_ranks(_NAME, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num)
    check_choices(_NAME, expert_ids, x_active_mask, moe_expert_num)
    torch._check(
        x.dim() == 2 and x.shape[0] == expert_ids.shape[0] and x.is_floating_point(),
        lambda: f"{_NAME}: x {tuple(x.shape)} of {x.dtype} must be ({expert_ids.shape[0]}, H), floating-point",
    )
    torch._check(
        expert_scales is None or (expert_scales.dtype == torch.float32 and expert_scales.shape == expert_ids.shape),
        lambda: f"{_NAME}: expert_scales must be fp32 {tuple(expert_ids.shape)}",
    )
    torch._check(
        expert_token_nums_type in (_PREFIX_SUMS, _COUNTS),
        lambda: f"{_NAME}: expert_token_nums_type must be 0 or 1, not {expert_token_nums_type}",
    )
    return most_rows(expert_ids, ep_world_size, local, global_bs), local
