# SPDX-License-Identifier: Apache-2.0
"""Real processes over gloo that stay alive while one layout after the other is tried in them."""

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, world_size: int, store: str, work: Callable[..., Any], arguments: tuple, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        result = work(*arguments)
        if rank == 0:
            torch.save(result, results)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()


def run(world_size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``work(*arguments)`` on ``world_size`` ranks; returns rank 0's result (tensors, lists, numbers)."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pt"
        mp.spawn(_rank, (world_size, f"{folder}/store", work, arguments, results), nprocs=world_size)
        return torch.load(results, weights_only=True)
