# SPDX-License-Identifier: Apache-2.0
"""Reference kernel of npu_moe_distribute_combine_add_rms_norm: combine, the residual's addition and RMSNorm in one.

The vendor documents it for Atlas A3 and bf16 only, and does not say where it rounds between its parts. Here it rounds
as the three operators one after the other do.
"""

import torch
from torch import Tensor

from executor.ops.reference.moe_distribute_combine import combine, combine_meta
from executor.ops.schemas import define, meta, reference

_NAME = "npu_moe_distribute_combine_add_rms_norm"

define(
    _NAME,
    "(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, Tensor expert_scales,"
    " Tensor residual_x, Tensor gamma, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *,"
    " Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? activation_scale=None,"
    " Tensor? weight_scale=None, Tensor? group_list=None, Tensor? expand_scales=None,"
    " Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None,"
    " Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None,"
    ' str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1,'
    " int shared_expert_rank_num=0, int global_bs=0, int out_dtype=0, int comm_quant_mode=0,"
    ' int group_list_type=0, str comm_alg="", float norm_eps=9.9999999999999995e-07, int zero_expert_num=0,'
    " int copy_expert_num=0, int const_expert_num=0) -> (Tensor, Tensor, Tensor)",
)
_OF_QUANTIZED_ROWS = ("activation_scale", "weight_scale", "group_list", "out_dtype", "group_list_type")


def _refuse(options: dict[str, object]) -> None:
    for name in _OF_QUANTIZED_ROWS:
        value = options.pop(name, None)
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{_NAME} reference: argument {name}")


def _check_residual(expert_ids: Tensor, expand_x: Tensor, residual_x: Tensor) -> None:
    wanted = (expert_ids.shape[0], 1, expand_x.shape[1])
    torch._check(
        residual_x.shape == wanted and residual_x.dtype == expand_x.dtype,
        lambda: (
            f"{_NAME}: residual_x {tuple(residual_x.shape)} of {residual_x.dtype} must be {wanted} of {expand_x.dtype}"
        ),
    )


@reference(_NAME)
def npu_moe_distribute_combine_add_rms_norm(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    norm_eps: float = 1e-6,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """``x = combine(expand_x) + residual_x``; returns ``(norm(x), 1 / rms(x), x)``, ``[T, 1, H]``, ``[T, 1, 1]`` and
    ``[T, 1, H]``.

    ``residual_x [T, 1, H]`` and ``gamma [H]`` in the dtype of ``expand_x``; ``expand_idx`` is dispatch's
    ``assist_info_for_combine``; the rest as for ``npu_moe_distribute_combine_v2``, and refused as there.
    """
    _refuse(options)
    _check_residual(expert_ids, expand_x, residual_x)
    sent = (expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales)
    summed = combine(*sent, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options)  # type: ignore[arg-type]
    return torch.ops.npu.npu_add_rms_norm(residual_x, summed.unsqueeze(1), gamma, norm_eps)


@meta(_NAME)
def _meta(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    norm_eps: float = 1e-6,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(options)
    _check_residual(expert_ids, expand_x, residual_x)
    sent = (expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales)
    summed = combine_meta(*sent, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options)  # type: ignore[arg-type]
    return torch.ops.npu.npu_add_rms_norm(residual_x, summed.unsqueeze(1), gamma, norm_eps)
