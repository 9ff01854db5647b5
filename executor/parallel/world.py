# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how one finds its rank, joins the others, and agrees with them."""

import os

import torch
import torch.distributed as dist


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


def agree(ids: list[int], device: torch.device) -> list[int]:
    """Rank 0's ``ids`` on every rank. All ranks give as many. Chosen tokens pass through here, so that no seed, clock
    or rounding of one rank can make its text another one's."""
    if not dist.is_initialized() or not ids:
        return ids
    tensor = torch.tensor(ids, dtype=torch.int64, device=device)
    dist.broadcast(tensor, 0)
    return [int(i) for i in tensor.tolist()]
