# SPDX-License-Identifier: Apache-2.0
"""Buckets cover every batch, and no choice of as many pads less."""

from itertools import combinations

import pytest

from executor.buckets import bucket_of, plan_buckets

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 256)


def worst(batch_size: int, buckets: tuple[int, ...]) -> float:
    return max(bucket_of(rows, buckets) / rows for rows in range(1, batch_size + 1))


@pytest.mark.parametrize("most", BUDGETS)
def test_every_batch_up_to_256_is_covered_within_the_bound(most):
    for batch_size in range(1, 257):
        buckets = plan_buckets(batch_size, most)
        assert buckets == tuple(sorted(set(buckets)))
        assert len(buckets) <= most
        assert buckets[-1] == batch_size
        assert most == 1 or buckets[0] == 1
        bound = (
            next(r for r in range(1, batch_size + 1) if r ** (most - 1) * 2 >= batch_size) if most > 1 else batch_size
        )
        assert worst(batch_size, buckets) <= bound


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_no_other_choice_of_as_many_pads_less(most):
    for batch_size in (1, 2, 5, 9, 16, 21):
        first = () if most == 1 or batch_size == 1 else (1,)
        between = range(len(first) + 1, batch_size)
        choices = [(*first, *c, batch_size) for n in range(most - len(first)) for c in combinations(between, n)]
        best = min(worst(batch_size, choice) for choice in choices)
        # the search ends within a float's precision of the best ratio, and rows are whole, so it finds it exactly
        assert worst(batch_size, plan_buckets(batch_size, most)) == best


def test_with_room_for_all_sizes_nothing_is_padded():
    assert plan_buckets(37, 37) == tuple(range(1, 38))
