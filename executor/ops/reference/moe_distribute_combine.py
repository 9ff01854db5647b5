# SPDX-License-Identifier: Apache-2.0
"""Reference kernel of npu_moe_distribute_combine_v2: the experts' rows back to their tokens, weighted and summed.

Shape letters: T tokens of this rank, K choices per token, H hidden size, A the most rows that can arrive at a rank.
"""

import torch
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
from executor.ops.schemas import define, meta, reference

define(
    "npu_moe_distribute_combine_v2",
    "(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, Tensor ep_send_counts,"
    " Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *,"
    " Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None,"
    " Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None,"
    " Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None,"
    ' Tensor? performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0,'
    " int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0,"
    ' int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, int copy_expert_num=0,'
    " int const_expert_num=0) -> Tensor",
)

_NAME = "npu_moe_distribute_combine_v2"


@reference(_NAME)
def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
    **unsupported: object,
) -> Tensor:
    """``out[i] = sum_j expert_scales[i, j] * (the row of token i that came back from expert_ids[i, j])``.

    ``expand_x [A, H]``: what the experts made of the rows that dispatch returned; the other tensors as given to and
    returned by dispatch; ``expert_scales [T, K]`` fp32 (fp64 with fp64 rows). ``expand_scales`` says nothing new here.
    Accumulated in fp32 (fp64 rows in fp64), cast once. Choices that were masked out add exactly zero. Returns
    ``[T, H]`` in the dtype of ``expand_x``. RuntimeError for tensors that do not belong to one dispatch.
    """
    refuse(_NAME, unsupported)
    local = check_ranks(_NAME, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num)
    check_choices(_NAME, expert_ids, x_active_mask, moe_expert_num)
    most = most_rows(expert_ids, ep_world_size, local, global_bs)
    _check(expand_x, expert_ids, assist_info_for_combine, expert_scales, most)
    group = process_group(group_ep, ep_world_size, ep_rank_id)
    chosen_TK = chosen(_NAME, expert_ids, x_active_mask, moe_expert_num)
    arrived = int(ep_send_counts[ep_world_size * local - 1])
    origin = assist_info_for_combine.view(-1, ASSIST)[:arrived, :3].long()  # source rank, token, choice
    by_source = origin[:, 0].argsort(stable=True)
    send = torch.bincount(origin[:, 0], minlength=ep_world_size)
    receive = all_to_all(send, [1] * ep_world_size, [1] * ep_world_size, group)
    sent = torch.bincount(expert_ids[chosen_TK].long() // local, minlength=ep_world_size)
    torch._check(
        torch.equal(receive, sent),
        lambda: f"{_NAME}: {receive.tolist()} rows come back per rank, {sent.tolist()} chosen: not of one dispatch",
    )
    splits = (send.tolist(), receive.tolist(), group)
    rows, where = (all_to_all(part[by_source], *splits) for part in (expand_x[:arrived], origin[:, 1:]))

    wide = torch.float64 if expand_x.dtype == torch.float64 else torch.float32
    copies_TKH = torch.zeros(*expert_ids.shape, expand_x.shape[1], dtype=wide)
    copies_TKH[where[:, 0], where[:, 1]] = rows.to(wide)
    weights_TK = expert_scales.to(wide).masked_fill(~chosen_TK, 0.0)
    return (copies_TKH * weights_TK.unsqueeze(-1)).sum(1).to(expand_x.dtype)


@meta(_NAME)
def combine_meta(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
    **unsupported: object,
) -> Tensor:
    refuse(_NAME, unsupported)
    local = check_ranks(_NAME, ep_world_size, ep_rank_id, moe_expert_num, shared_expert_num)
    check_choices(_NAME, expert_ids, x_active_mask, moe_expert_num)
    most = most_rows(expert_ids, ep_world_size, local, global_bs)
    _check(expand_x, expert_ids, assist_info_for_combine, expert_scales, most)
    return expand_x.new_empty(expert_ids.shape[0], expand_x.shape[1])


def _check(expand_x: Tensor, expert_ids: Tensor, assist: Tensor, expert_scales: Tensor, most: int) -> None:
    """Refuse what shapes and dtypes alone tell."""
    torch._check(
        expand_x.dim() == 2 and expand_x.shape[0] == most and assist.numel() == most * ASSIST,
        lambda: (
            f"{_NAME}: expand_x {tuple(expand_x.shape)} and {assist.numel()} numbers of assist_info_for_combine must"
            f" be ({most}, H) and {most * ASSIST} for this global_bs"
        ),
    )
    exact = expand_x.dtype == expert_scales.dtype == torch.float64
    torch._check(
        expert_scales.shape == expert_ids.shape and (exact or expert_scales.dtype == torch.float32),
        lambda: f"{_NAME}: expert_scales must be fp32 {tuple(expert_ids.shape)}",
    )
