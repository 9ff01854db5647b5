# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how one finds its rank, joins the others, and agrees with them."""

import os

import torch
import torch.distributed as dist

from executor.parallel.groups import Group, forget_communicators


def rank() -> int:
    """This process's number among those that torchrun started; 0 when it started none."""
    return int(os.environ.get("RANK", "0"))


def launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device_type: str) -> None:
    """Initialise torch.distributed, once: gloo between CPUs, hccl between NPUs (not run on a card yet)."""
    if not dist.is_initialized():
        dist.init_process_group("hccl" if device_type == "npu" else "gloo")


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_communicators()


def share(ids: list[int], group: Group) -> list[int]:
    """``ids`` of the group's first rank on all its ranks; all give as many. Chosen tokens pass through here, so that no
    seed, clock or rounding of one rank can make its text another one's."""
    if group.size == 1 or not ids:
        return ids
    tensor = torch.tensor(ids, dtype=torch.int64)
    dist.broadcast(tensor, group=group.handle, group_src=0)
    return [int(i) for i in tensor.tolist()]


def largest(values: list[int], group: Group) -> list[int]:
    """The largest of each value over the group; all ranks give as many."""
    if group.size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.handle)
    return [int(v) for v in tensor.tolist()]


def collect(text: str, group: Group) -> list[str]:
    """Each rank's ``text``, in rank order, on every rank of the group."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    (most,) = largest([len(data)], group)
    lengths = group.all_gather(torch.tensor([len(data)]))
    rows = group.all_gather(torch.nn.functional.pad(data, (0, most - len(data))).unsqueeze(0))
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist())]
