# SPDX-License-Identifier: Apache-2.0
"""Where the parts of an axis and the tokens of a step lie over the ranks of a group.

T tokens of an attention group. Replicated: every rank holds all of them. Sharded: each rank of the whole run holds an
equal share, so T is padded to a multiple of the attention group and to the largest T of all groups; padding is added
and removed in this file only. A layer gathers what it needs on entry and gives back what is its own on exit, and
neither it nor its weights know which of the two it was.
"""

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F

from executor.batch import Batch
from executor.errors import UserError
from executor.parallel.groups import Group


def shard(total: int, group: Group, what: str) -> range:
    """Indices of ``total`` equal parts' slice owned by this rank. Raises UserError if the group does not divide it."""
    if total % group.size:
        legal = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0 and n <= 64)
        raise UserError(
            f"parallel_config.{group.name}_size={group.size} does not divide {what}={total}; legal: {legal}"
        )
    width = total // group.size
    return range(group.rank * width, (group.rank + 1) * width)


def shard_kv_heads(num_kv_heads: int, group: Group) -> range:
    """KV heads of this rank: split while there are enough, else replicated, ``max(num_kv_heads // tp, 1)`` per rank.

    With more ranks than KV heads, neighbouring ranks share a head, so that each query head finds its own.
    """
    if group.size <= num_kv_heads:
        return shard(num_kv_heads, group, "num_key_value_heads")
    if group.size % num_kv_heads:
        raise UserError(
            f"parallel_config.{group.name}_size={group.size} is not a multiple of num_key_value_heads={num_kv_heads}, "
            "so KV heads cannot be replicated evenly"
        )
    head = group.rank * num_kv_heads // group.size
    return range(head, head + 1)


class Tokens(Protocol):
    """How the tokens of a step enter and leave a layer whose weights are split over a group."""

    def enter(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The rows that this rank's part of the weights is applied to: those of every rank of the group."""

    def leave(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Partial results of these rows, summed over the group; each rank gets the rows that it brought."""

    def leave_columns(self, y: torch.Tensor) -> torch.Tensor:
        """Each rank's columns of these rows, side by side; each rank gets the rows that it brought."""


class Replicated:
    """All ranks of ``group`` bring the same rows."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x

    def leave(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.group.all_reduce(y)

    def leave_columns(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.group.size == 1 else self.group.all_gather(y.t()).t()


class Sharded:
    """Each rank of ``group`` brings as many rows as the others, and all are different."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.group.all_gather(x)

    def leave(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.group.reduce_scatter(y)

    def leave_columns(self, y: torch.Tensor) -> torch.Tensor:
        size = self.group.size
        if size == 1:
            return y
        parts = self.group.all_to_all(y).unflatten(0, (size, -1))  # [size, own rows, columns]
        return parts.transpose(0, 1).flatten(1)


class Residual(Tokens, Protocol):
    """The tokens of a step between the layers, over the attention group."""

    def own(self, batch: Batch) -> Batch:
        """``batch`` with the ``input_ids`` and ``active`` of this rank's tokens only."""

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows ``index`` of the T tokens, on every rank of the group."""


class ReplicatedResidual(Replicated):
    def own(self, batch: Batch) -> Batch:
        return batch

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]


class ShardedResidual(Sharded):
    """Attention works on the T real tokens, everything else on equal shares that may end in padding."""

    def own(self, batch: Batch) -> Batch:
        share = self._share(batch)
        mine = slice(self.group.rank * share, (self.group.rank + 1) * share)
        ids, active = self._pad(batch.input_ids, batch)[mine], self._pad(batch.active, batch)[mine]
        return dataclasses.replace(batch, input_ids=ids, active=active)

    def enter(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().enter(x, batch)[: batch.num_tokens]

    def leave(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().leave(self._pad(y, batch), batch)

    def heads_to_tokens(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``[T, columns]`` of this rank's heads to ``[own tokens, size * columns]`` of all heads."""
        return self.leave_columns(self._pad(x, batch))

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """One sum of rows that are zero on all ranks but their owner's: in prefill few of the tokens are wanted."""
        local = index - self.group.rank * x.shape[0]
        elsewhere = (local < 0) | (local >= x.shape[0])
        return self.group.all_reduce(x[local.masked_fill(elsewhere, 0)].masked_fill(elsewhere.unsqueeze(-1), 0))

    def _share(self, batch: Batch) -> int:
        return -(-batch.most_tokens // self.group.size)

    def _pad(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        missing = self._share(batch) * self.group.size - x.shape[0]
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
