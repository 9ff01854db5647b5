# SPDX-License-Identifier: Apache-2.0
"""What the reference kernels of MoE dispatch and combine share: they communicate inside the operator.

The process group is found by its name, as the vendor's kernels find their communicator. One rank alone needs no group
(the vendor starts at two). ``moe_distribute_dispatch.py`` and ``moe_distribute_combine.py`` have the two operators.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

ASSIST = 128  # int32 numbers per row of assist_info_for_combine; here: source rank, token, choice, and nothing


def process_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> dist.ProcessGroup | None:
    """The group of that name, which must have this size and this rank; None for a single rank."""
    if ep_world_size == 1:
        return None
    group = _resolve_process_group(GroupName(group_ep))
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    torch._check(
        (size, rank) == (ep_world_size, ep_rank_id),
        lambda: f"group {group_ep!r} has {size=}, {rank=}, not {ep_world_size=}, {ep_rank_id=}",
    )
    return group


def all_to_all(values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``send[r]`` rows to rank r and ``receive[r]`` from it, both in rank order."""
    if group is None:
        return values
    out = values.new_empty((sum(receive), *values.shape[1:]))
    dist.all_to_all_single(out, values.contiguous(), receive, send, group=group)
    return out


def refuse(name: str, arguments: dict[str, object]) -> None:
    """NotImplementedError for an argument that is not at the schema's default."""
    schema = getattr(torch.ops.npu, name).default._schema
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    for key, value in arguments.items():
        if isinstance(value, Tensor) or value != defaults[key]:
            raise NotImplementedError(f"{name} reference: argument {key}")


def chosen(name: str, expert_ids: Tensor, x_active_mask: Tensor | None, moe_expert_num: int) -> Tensor:
    """Bool ``[T, K]``: which choices take part. RuntimeError for a mask or ids that the vendor refuses."""
    mask_TK = torch.ones_like(expert_ids, dtype=torch.bool)
    if x_active_mask is not None:
        whole_tokens = x_active_mask.dim() == 1
        torch._check(
            not whole_tokens or not bool((x_active_mask[1:] & ~x_active_mask[:-1]).any()),
            lambda: f"{name}: the true ones of x_active_mask must come first, not {x_active_mask.tolist()}",
        )
        mask_TK = x_active_mask.unsqueeze(1).expand_as(expert_ids) if whole_tokens else x_active_mask
    ids = expert_ids[mask_TK]
    torch._check(
        bool(((ids >= 0) & (ids < moe_expert_num)).all()),
        lambda: f"{name}: expert_ids must lie in 0..{moe_expert_num - 1}",
    )
    # ids that do not take part become different negative ones: they may repeat
    own = -1 - torch.arange(expert_ids.shape[1], dtype=expert_ids.dtype)
    sorted_TK = torch.where(mask_TK, expert_ids, own).sort(-1).values
    torch._check(
        not bool((sorted_TK[:, 1:] == sorted_TK[:, :-1]).any()),
        lambda: f"{name}: the expert_ids of a token must differ",
    )
    return mask_TK


def check_choices(name: str, expert_ids: Tensor, x_active_mask: Tensor | None, moe_expert_num: int) -> None:
    """RuntimeError for shapes and dtypes that the vendor refuses."""
    torch._check(
        expert_ids.dim() == 2 and expert_ids.dtype == torch.int32 and 0 < expert_ids.shape[1] <= moe_expert_num,
        lambda: (
            f"{name}: expert_ids {tuple(expert_ids.shape)} of {expert_ids.dtype} must be (T, K) int32 with"
            f" 0 < K <= {moe_expert_num}"
        ),
    )
    torch._check(
        x_active_mask is None
        or (x_active_mask.dtype == torch.bool and x_active_mask.shape in (expert_ids.shape[:1], expert_ids.shape)),
        lambda: f"{name}: x_active_mask must be bool (T,) or (T, K)",
    )


def most_rows(expert_ids: Tensor, ep_world_size: int, local: int, global_bs: int) -> int:
    """A, the most rows that can arrive at a rank."""
    return (global_bs or expert_ids.shape[0] * ep_world_size) * min(local, expert_ids.shape[1])


def check_ranks(name: str, ep_world_size: int, ep_rank_id: int, moe_expert_num: int, shared_expert_num: int) -> int:
    """L. RuntimeError for numbers that do not go together."""
    torch._check(
        0 <= ep_rank_id < ep_world_size and moe_expert_num % ep_world_size == 0,
        lambda: f"{name}: {ep_rank_id=} must be below {ep_world_size=}, which must divide {moe_expert_num=}",
    )
    # the schema's default of 1 means none, as long as no rank is set aside for a shared expert
    torch._check(shared_expert_num in (0, 1), lambda: f"{name}: {shared_expert_num=} without ranks for them")
    return moe_expert_num // ep_world_size
