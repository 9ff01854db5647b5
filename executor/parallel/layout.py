# SPDX-License-Identifier: Apache-2.0
"""Which part of an axis belongs to a rank of a group."""

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
