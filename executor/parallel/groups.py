# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and the one table that says which ranks form which group.

A layer takes a Group and never asks for "the tensor-parallel size": its shard, its slice of the checkpoint and its
collective all come from the Group it was given. A Group of size 1 is the identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from executor.platform import npu

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)  # travel as bytes: gloo refuses these types


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype in NARROW else x


@dataclass(frozen=True)
class Group:
    """``size`` ranks that hold parts of one thing; this process is number ``rank`` of them.

    ``handle`` is None while planning (shapes and bytes of any rank need no processes); a collective then raises.
    ``hccl_name`` is what a fused communication operator calls this group, where such operators use it: its HCCL
    communicator, on a CPU its gloo group. A constant, as a compiled step cannot look it up.
    """

    name: str
    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    hccl_name: str = ""

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
        dist.all_gather_single(_as_bytes(out), _as_bytes(x.contiguous()), group=self._connected())
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks' ``[size * n, ...]``, of which each keeps its own ``[n, ...]``."""
        if self.size == 1:
            return x
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        dist.reduce_scatter_single(out, x.contiguous(), group=self._connected())
        return out

    def all_to_all(
        self, x: torch.Tensor, send: list[int] | None = None, receive: list[int] | None = None
    ) -> torch.Tensor:
        """Rows of ``x`` to their ranks: ``send[r]`` rows go to rank ``r``, ``receive[r]`` come from it, in rank order.
        Without counts all parts are equally long."""
        if self.size == 1:
            return x
        out = x.new_empty((x.shape[0] if receive is None else sum(receive), *x.shape[1:]))
        dist.all_to_all_single(_as_bytes(out), _as_bytes(x.contiguous()), receive, send, group=self._connected())
        return out


@dataclass(frozen=True)
class Groups:
    """Every group a rank belongs to, by what it splits. ``moe_ep_mc2`` has the ranks of ``moe_ep`` and a communicator
    of its own: the MC2 kernels allow no other operator in theirs."""

    attn_tp: Group
    attn_dp: Group
    dense_tp: Group
    moe_tp: Group
    moe_ep: Group
    moe_ep_mc2: Group
    embed_tp: Group
    lmhead_tp: Group

    def sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name).size for f in fields(self)}


NAMES = tuple(f.name for f in fields(Groups))
_communicators: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}


def _ranks(sizes: Mapping[str, int], name: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group ``name`` that ``rank`` belongs to, in their order in it: tensor-parallel ranks are
    neighbours; DP and EP stride over the tensor-parallel group inside them."""
    stride = {"attn_dp": "attn_tp", "moe_ep": "moe_tp", "moe_ep_mc2": "moe_tp"}.get(name)
    step = sizes[stride] if stride else 1
    first = rank - rank // step % sizes[name] * step
    return tuple(range(first, first + sizes[name] * step, step))


def planned_groups(rank: int = 0, **sizes: int) -> Groups:
    """The groups of ``rank`` without processes; a size that is not given is 1."""
    table = {name: sizes.get(name, 1) for name in NAMES}
    return Groups(**{name: Group(name, _ranks(table, name, rank).index(rank), table[name]) for name in NAMES})


def communicators(rank: int, sizes: Mapping[str, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Group name -> (purpose, ranks) of the communicator that ``rank`` uses for it; groups of size 1 need none."""
    table = {name: sizes.get(name, 1) for name in NAMES}
    return {name: (npu.purpose(name), _ranks(table, name, rank)) for name in NAMES if table[name] > 1}


def connected_groups(
    sizes: Mapping[str, int], *, timeout_seconds: float = 600, buffer_mib: Mapping[str, int | None] | None = None
) -> Groups:
    """The groups of this process, with processes behind them. ``torch.distributed`` is initialised; every rank calls
    this with the same sizes, and all ranks create all groups in the same order, as the library demands. Groups of the
    same ranks and the same purpose share one communicator, also with those of an earlier call.

    Args:
        buffer_mib: HCCL's buffer per purpose; see ``platform.npu``.
    """
    buffers = buffer_mib or {}
    me, everyone = dist.get_rank(), range(dist.get_world_size())
    used = [communicators(rank, sizes) for rank in everyone]
    alone = all(len(set(keys.values())) == 1 for keys in used)
    for name in NAMES:
        for rank in everyone:
            key = used[rank].get(name)
            if key is not None and key not in _communicators:
                purpose, ranks = key
                _communicators[key] = dist.new_group(
                    ranks,
                    timeout=timedelta(seconds=timeout_seconds),
                    pg_options=npu.group_options(purpose, buffers.get(purpose), alone=alone),
                )
    planned = planned_groups(me, **sizes)
    return Groups(**{name: _connected(getattr(planned, name), used[me].get(name)) for name in NAMES})


def _connected(group: Group, key: tuple[str, tuple[int, ...]] | None) -> Group:
    if key is None:
        return group
    handle = _communicators[key]
    fused = key[0] == npu.MC2
    return replace(group, handle=handle, hccl_name=npu.communicator_name(handle, group.rank) if fused else "")


def forget_communicators() -> None:
    """After torch.distributed was shut down, none of its groups is of use any more."""
    _communicators.clear()
