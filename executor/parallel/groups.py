# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the one table that says which ranks form which group.

A layer takes a Group and never asks for "the tensor-parallel size": its shard, its slice of the checkpoint and its
collective all come from the Group it was given. A Group of size 1 is the identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

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
        dist.all_gather_single(out, x.contiguous(), group=self._connected())
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


NAMES = tuple(f.name for f in fields(Groups))


def _ranks(sizes: Mapping[str, int], name: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group ``name`` that ``rank`` belongs to, in their order in it: tensor-parallel ranks are
    neighbours; DP and EP stride over the tensor-parallel group inside them."""
    stride = {"attn_dp": sizes["attn_tp"], "moe_ep": sizes["moe_tp"]}.get(name, 1)
    first = rank - rank // stride % sizes[name] * stride
    return tuple(range(first, first + sizes[name] * stride, stride))


def planned_groups(rank: int = 0, **sizes: int) -> Groups:
    """The groups of ``rank`` without processes; a size that is not given is 1."""
    table = {name: sizes.get(name, 1) for name in NAMES}
    return Groups(**{name: Group(name, _ranks(table, name, rank).index(rank), table[name]) for name in NAMES})


def connected_groups(**sizes: int) -> Groups:
    """The groups of this process, with processes behind them. ``torch.distributed`` is initialised; every rank calls
    this with the same sizes, and all ranks create all groups in the same order, as the library demands. Two groups of
    the same ranks share one communicator."""
    me = dist.get_rank()
    planned = planned_groups(me, **sizes)
    table, handles = planned.sizes(), {}
    for name in NAMES:
        for rank in range(dist.get_world_size()):
            ranks = _ranks(table, name, rank)
            if len(ranks) > 1 and ranks not in handles:
                handles[ranks] = dist.new_group(ranks)
    return Groups(
        **{name: replace(getattr(planned, name), handle=handles.get(_ranks(table, name, me))) for name in NAMES}
    )
