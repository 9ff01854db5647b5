# SPDX-License-Identifier: Apache-2.0
"""Which numbers of rows a decode step may have.

A graph has one shape, so a step is padded with rows that belong to nobody up to the next bucket. Few buckets are few
graphs to compile; many are little padding.
"""


def plan_buckets(batch_size: int, most: int) -> tuple[int, ...]:
    """At most ``most`` sizes, ascending, the last one ``batch_size``. One row is a bucket, as latency is what counts
    there; the others are such that the worst case of (rows of the bucket) / (rows that are wanted) is as small as it
    can be.

    That worst case is at most the smallest whole r with ``2 * r ** (most - 1) >= batch_size``: above one row, each
    bucket reaches r times as far as the one before it.
    """
    if most == 1 or batch_size == 1:
        return (batch_size,)
    low, high = 1.0, float(batch_size)
    for _ in range(60):  # halves an interval below 2**31 down to the precision of a float
        ratio = (low + high) / 2
        low, high = (low, ratio) if len(_covering(batch_size, ratio)) <= most else (ratio, high)
    return tuple(_covering(batch_size, high))


def _covering(batch_size: int, ratio: float) -> list[int]:
    """One row, and the fewest buckets that pad no other number of rows to more than ``ratio`` times as many."""
    sizes = [1]
    while sizes[-1] < batch_size:
        smallest = sizes[-1] + 1
        sizes.append(min(batch_size, max(smallest, int(smallest * ratio))))
    return sizes


def bucket_of(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds ``rows``."""
    return next(size for size in buckets if size >= rows)
