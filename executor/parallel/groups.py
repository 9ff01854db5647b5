# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the one table that says which ranks form which group.

A layer takes a Group and never asks for "the tensor-parallel size": its shard, its slice of the checkpoint and its
collective all come from the Group it was given. A Group of size 1 is the identity.
"""

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """``size`` ranks that hold parts of one thing; this process is number ``rank`` of them.

    ``handle`` is None while planning (shapes and bytes of any rank need no processes); a collective then raises.
    """

    name: str
    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def _connected(self) -> dist.ProcessGroup:
        if self.handle is None:
            raise RuntimeError(f"group {self.name} of size {self.size} is for planning: it has no processes behind it")
        return self.handle

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns ``x``."""
        if self.size > 1:
            dist.all_reduce(x, group=self._connected())
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' ``[n, ...]`` along dim 0, in rank order: ``[size * n, ...]``."""
        if self.size == 1:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._connected())
        return out


@dataclass(frozen=True)
class Groups:
    """Every group a rank belongs to, by what it splits."""

    attn_tp: Group
    attn_dp: Group
    dense_tp: Group
    moe_tp: Group
    moe_ep: Group
    embed_tp: Group
    lmhead_tp: Group

    def sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name).size for f in fields(self)}


def planned_groups(
    rank: int = 0,
    *,
    attn_tp: int = 1,
    attn_dp: int = 1,
    dense_tp: int = 1,
    moe_tp: int = 1,
    moe_ep: int = 1,
    embed_tp: int = 1,
    lmhead_tp: int = 1,
) -> Groups:
    """The groups of ``rank`` without processes. Tensor-parallel ranks are neighbours; DP and EP stride over them."""
    return Groups(
        attn_tp=Group("attn_tp", rank % attn_tp, attn_tp),
        attn_dp=Group("attn_dp", rank // attn_tp % attn_dp, attn_dp),
        dense_tp=Group("dense_tp", rank % dense_tp, dense_tp),
        moe_tp=Group("moe_tp", rank % moe_tp, moe_tp),
        moe_ep=Group("moe_ep", rank // moe_tp % moe_ep, moe_ep),
        embed_tp=Group("embed_tp", rank % embed_tp, embed_tp),
        lmhead_tp=Group("lmhead_tp", rank % lmhead_tp, lmhead_tp),
    )
