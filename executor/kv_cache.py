# SPDX-License-Identifier: Apache-2.0
"""The paged key/value cache: memory per layer, and the pool that hands out its blocks."""

from collections.abc import Iterable
from typing import NamedTuple

import torch


def scratch_blocks(batch_size: int, block_size: int) -> int:
    """Blocks at the start of the cache that no sequence ever owns: a row without a request writes to a slot of its
    own there, since two writes to one slot are undefined on a card (``batch.dead_span``)."""
    return -(-batch_size // (block_size - 1))


class LayerCache(NamedTuple):
    """Keys and values of one layer, each ``[num_blocks, block_size, kv_heads, head_dim]``."""

    key: torch.Tensor
    value: torch.Tensor


def allocate(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """Zeroed caches. On a CPU the pages cost nothing until they are written."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return [
        LayerCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(num_layers)
    ]


class BlockPool:
    """Blocks ``scratch .. num_blocks - 1``, each owned by at most one sequence."""

    def __init__(self, num_blocks: int, scratch: int) -> None:
        self.num_blocks = num_blocks
        self.scratch = scratch
        self._free = list(range(num_blocks - 1, scratch - 1, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that sequences can ever own (all but the scratch blocks)."""
        return self.num_blocks - self.scratch

    def take(self, count: int) -> list[int]:
        """``count`` blocks. Raises RuntimeError if there are not enough: admission has to ask ``num_free`` first."""
        if count > self.num_free:
            raise RuntimeError(f"{count} cache blocks asked for, {self.num_free} free")
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self._owned:
                raise RuntimeError(f"cache block {block} is given back but nobody owns it")
            self._owned.remove(block)
            self._free.append(block)

    def check(self, owners: Iterable[list[int]]) -> None:
        """Raises RuntimeError unless the sequences' blocks and the free list are a partition of the pool."""
        owned = [block for blocks in owners for block in blocks]
        if sorted(owned + self._free) != list(range(self.scratch, self.num_blocks)) or set(owned) != self._owned:
            raise RuntimeError(
                f"cache blocks leaked or shared: {len(owned)} owned, {self.num_free} free of {self.capacity}"
            )
