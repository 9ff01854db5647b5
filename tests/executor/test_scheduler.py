# SPDX-License-Identifier: Apache-2.0
"""Scheduling without a model: whatever the requests, every token of every request passes exactly once, in order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.buckets import bucket_of, plan_buckets
from executor.errors import UserError
from executor.kv_cache import BlockPool
from executor.scheduler import Request, Scheduler

BLOCK = 16


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 20)), min_size=1, max_size=25),
    batch_size=st.integers(1, 5),
    budget=st.integers(1, 40),
    num_blocks=st.integers(8, 20),
)
def test_every_token_is_processed_once_at_its_own_slot(sizes, batch_size, budget, num_blocks):
    buckets = plan_buckets(batch_size, 2)
    budget += batch_size  # the plan demands more than the batch
    scheduler = Scheduler(
        buckets=buckets,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_seq_len=96,
        max_prefill_tokens=budget,
        causal_mask=torch.empty(0),
    )
    sequences = []
    for number, (prompt, new) in enumerate(sizes):
        ids = [1000 * number + i for i in range(prompt)]
        sequences.append(scheduler.add(Request(prompt=ids, max_new_tokens=new)))
    seen: dict[int, list[int]] = {s.number: [] for s in sequences}
    cache: dict[int, int] = {}  # slot -> token id that was written there
    for _ in range(10_000):
        if scheduler.idle:
            break
        step = scheduler.next_step()
        batch = step.batch
        assert batch.num_tokens <= budget
        assert batch.actual_seq_qlen[-1] == batch.num_tokens
        assert (batch.phase == "decode") == (batch.causal_mask is None)
        if batch.phase == "decode":
            assert batch.num_tokens == bucket_of(len(step.cached), buckets)
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots)
        cache.update(zip(slots, batch.input_ids.tolist()))
        live = [s for s, _ in step.cached]
        assert sorted(s.number for s in live) == sorted({s.number for s in live})
        for sequence, count in step.cached:
            known = sequence.ids
            seen[sequence.number] += known[sequence.num_cached : sequence.num_cached + count]
            sequence.num_cached += count
            # the cache holds exactly this sequence's tokens where its block table says
            where = [sequence.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(sequence.num_cached)]
            assert [cache[slot] for slot in where] == known[: sequence.num_cached]
        for sequence in step.sequences:
            assert sequence.num_cached == len(sequence.ids)
            sequence.output.append(1000 * sequence.number + len(sequence.ids))
            if len(sequence.output) == sequence.max_new_tokens:
                scheduler.finish(sequence)
        scheduler.check()
    assert scheduler.idle
    assert scheduler.pool.num_free == scheduler.pool.capacity
    for sequence, (prompt, new) in zip(sequences, sizes):
        assert len(sequence.output) == new
        assert seen[sequence.number] == [1000 * sequence.number + i for i in range(prompt + new - 1)]


def test_head_of_the_queue_is_not_overtaken():
    """A request that does not fit yet makes later, smaller ones wait: nobody starves."""
    scheduler = Scheduler(
        buckets=(3,), num_blocks=5, block_size=BLOCK, max_seq_len=64, max_prefill_tokens=64, causal_mask=torch.empty(0)
    )
    first, big, small = (scheduler.add(Request(prompt=[1] * n, max_new_tokens=1)) for n in (20, 60, 3))
    scheduler.next_step()
    assert scheduler.running == [first]
    scheduler.finish(first)
    scheduler.next_step()
    assert scheduler.running == [big]
    assert list(scheduler.waiting) == [small]


def test_request_numbers_in_messages():
    scheduler = Scheduler(
        buckets=(1,), num_blocks=3, block_size=BLOCK, max_seq_len=64, max_prefill_tokens=64, causal_mask=torch.empty(0)
    )
    scheduler.add(Request(prompt=[1], max_new_tokens=1))
    with pytest.raises(UserError, match=r"^prompt 2 is empty$"):
        scheduler.add(Request(prompt=[], max_new_tokens=1))
    with pytest.raises(UserError, match=r"prompt 2 with its answer .* needs 4 cache blocks, the cache has 2"):
        scheduler.add(Request(prompt=[1] * 40, max_new_tokens=15))


def test_block_pool_refuses_misuse():
    pool = BlockPool(num_blocks=4, scratch=1)
    taken = pool.take(2)
    with pytest.raises(RuntimeError, match="2 cache blocks asked for, 1 free"):
        pool.take(2)
    with pytest.raises(RuntimeError, match="nobody owns it"):
        pool.give_back([0])
    with pytest.raises(RuntimeError, match="leaked or shared"):
        pool.check([taken[:1]])
    pool.give_back(taken)
    with pytest.raises(RuntimeError, match="nobody owns it"):
        pool.give_back(taken[:1])
    pool.check([])
