# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which requests go into the next step.

A fixed number of rows serves any number of requests: a finished row is refilled from the queue, first come first
served, as soon as the cache has blocks for the whole of the next request (prompt and answer), so a running answer can
never run out of cache and a long one holds up nobody else. A prefill step carries prompt chunks, at most
``max_prefill_tokens`` tokens, and one token of each running answer; a decode step has the rows of one of few buckets.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from executor.batch import Batch, Phase, Span, build_batch, dead_span
from executor.buckets import bucket_of
from executor.errors import UserError
from executor.kv_cache import BlockPool, scratch_blocks
from executor.sampler import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Request:
    """``prompt`` ids, how long the answer may become, what ends it, and how its tokens are chosen."""

    prompt: list[int]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)


class Sequence:
    """A request in a row: its cache blocks, and how far it is."""

    def __init__(self, number: int, request: Request, max_new_tokens: int, blocks_needed: int) -> None:
        self.number = number
        self.request = request
        self.max_new_tokens = max_new_tokens
        self.blocks_needed = blocks_needed
        self.blocks: list[int] = []
        self.output: list[int] = []
        self.num_cached = 0  # tokens whose keys and values are in the cache
        self.started = 0.0  # time.perf_counter() before its first step
        self.generator = request.sampling.generator()

    @property
    def ids(self) -> list[int]:
        return self.request.prompt + self.output

    @property
    def penalized_history(self) -> list[int]:
        """The ids that a repetition penalty looks at; none without a penalty."""
        return [] if self.request.sampling.repetition_penalty == 1.0 else self.ids

    @property
    def prompt_left(self) -> int:
        return max(0, len(self.request.prompt) - self.num_cached)

    def span(self, count: int) -> Span:
        """The next ``count`` tokens of the prompt, or the answer's last token."""
        if self.prompt_left:
            ids = self.request.prompt[self.num_cached : self.num_cached + count]
        else:
            ids = self.output[-1:]
        return Span(ids, self.num_cached, self.blocks)


@dataclass(frozen=True)
class Step:
    """What to compute and for whom.

    Attributes:
        batch: the tokens.
        sequences: those whose next token this step computes.
        rows: the rows of the logits that are theirs, int64.
        cached: what the step adds to the cache.
    """

    batch: Batch
    sequences: list[Sequence]
    rows: torch.Tensor
    cached: list[tuple[Sequence, int]]
    num_prompt_tokens: int


class Outlook(NamedTuple):
    """What an attention group is about to do, as numbers whose largest over all groups is what they all do.

    Attributes:
        phase: ``IDLE``, ``DECODE``, ``PREFILL`` (if one group has a prompt to process, all take a prefill step) or
            ``FAILED`` (the last step of a group went wrong, so all give up).
        num_tokens: T of this group's step, if it is of that phase.
        num_rows: its rows of logits.
    """

    phase: int
    num_tokens: int
    num_rows: int


IDLE, DECODE, PREFILL, FAILED = 0, 1, 2, 3


class Scheduler:
    """The requests of one attention group. Groups schedule by themselves; what they have to do in step they agree on
    by their ``Outlook``. A group without requests takes part with a row that belongs to nobody."""

    def __init__(
        self,
        *,
        buckets: tuple[int, ...],
        num_blocks: int,
        block_size: int,
        max_seq_len: int,
        max_prefill_tokens: int,
        causal_mask: torch.Tensor,
    ) -> None:
        """``buckets``: rows that a decode step may have; the last one is how many sequences run together."""
        batch_size = buckets[-1]
        self.buckets = buckets
        self.block_size = block_size
        self.max_seq_len = max_seq_len
        self.max_blocks = -(-max_seq_len // block_size)
        self.max_prefill_tokens = max_prefill_tokens
        self.causal_mask = causal_mask
        self.pool = BlockPool(num_blocks, scratch_blocks(batch_size, block_size))
        self.rows: list[Sequence | None] = [None] * batch_size
        self.waiting: deque[Sequence] = deque()
        self._count = 0

    def require(self, request: Request, number: int) -> tuple[int, int]:
        """How many new tokens ``request`` can get at most, and how many cache blocks it needs. Raises UserError, which
        calls it prompt ``number``, counted from 0, if it can never be served."""
        length = len(request.prompt)
        if length == 0:
            raise UserError(f"prompt {number + 1} is empty")
        if length >= self.max_seq_len:
            raise UserError(
                f"prompt {number + 1} has {length} tokens, which leaves no room for an answer in max_seq_len="
                f"{self.max_seq_len}; shorten it, set data_config.input_truncated_len, or raise "
                "scheduler_config.max_seq_len"
            )
        if request.max_new_tokens < 1:
            raise UserError(
                f"prompt {number + 1} asks for max_new_tokens={request.max_new_tokens}; it must be at least 1"
            )
        new_tokens = min(request.max_new_tokens, self.max_seq_len - length)
        blocks = -(-(length + new_tokens) // self.block_size)
        if blocks > self.pool.capacity:
            raise UserError(
                f"prompt {number + 1} with its answer ({length} + {new_tokens} tokens) needs {blocks} cache blocks, "
                f"the cache has {self.pool.capacity}; raise scheduler_config.num_blocks or lower max_new_tokens"
            )
        return new_tokens, blocks

    def add(self, request: Request) -> Sequence:
        """Queue ``request``. Raises UserError if it can never be served."""
        sequence = Sequence(self._count, request, *self.require(request, self._count))
        self._count += 1
        self.waiting.append(sequence)
        return sequence

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.rows if sequence is not None]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def finish(self, sequence: Sequence) -> None:
        """Free the row and the blocks of ``sequence``."""
        self.rows[self.rows.index(sequence)] = None
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []

    def check(self) -> None:
        """Raises RuntimeError if a cache block is lost or shared."""
        self.pool.check(sequence.blocks for sequence in self.running)

    def prepare(self) -> Outlook:
        """Admit what fits, and say what comes next."""
        self._admit()
        spans = [span for _, span in self._mixed_spans()] or [dead_span(0, self.block_size)]
        tokens = sum(len(span.ids) for span in spans)
        if any(sequence.prompt_left for sequence in self.running):
            return Outlook(PREFILL, tokens, len(spans))
        # should another group prefill, the same rows go along in its step
        return Outlook(DECODE if self.running else IDLE, tokens, len(spans))

    def next_step(self, agreed: Outlook | None = None) -> Step:
        """Build the next batch as all groups ``agreed``; None: there is only this one, and it has something to do."""
        agreed = agreed or self.prepare()
        return self._prefill_step(agreed) if agreed.phase == PREFILL else self._decode_step(agreed)

    def _admit(self) -> None:
        for row, occupant in enumerate(self.rows):
            if occupant is None and self.waiting and self.waiting[0].blocks_needed <= self.pool.num_free:
                sequence = self.waiting.popleft()
                sequence.blocks = self.pool.take(sequence.blocks_needed)
                self.rows[row] = sequence

    def _mixed_spans(self) -> list[tuple[Sequence, Span]]:
        """One token of each running answer, then chunks of prompts in the order of the requests."""
        spans = [(sequence, sequence.span(1)) for sequence in self.running if not sequence.prompt_left]
        left = self.max_prefill_tokens - len(spans)
        for sequence in sorted(self.running, key=lambda s: s.number):
            if sequence.prompt_left and left > 0:
                spans.append((sequence, sequence.span(left)))
                left -= len(spans[-1][1].ids)
        return spans

    def _prefill_step(self, agreed: Outlook) -> Step:
        spans = self._mixed_spans()
        prompt_tokens = sum(len(span.ids) for sequence, span in spans if sequence.prompt_left)
        batch = self._build("prefill", [span for _, span in spans], agreed)
        wanting = [row for row, (sequence, span) in enumerate(spans) if len(span.ids) >= sequence.prompt_left]
        return Step(
            batch,
            [spans[row][0] for row in wanting],
            torch.tensor(wanting, dtype=torch.int64),
            [(sequence, len(span.ids)) for sequence, span in spans],
            prompt_tokens,
        )

    def _decode_step(self, agreed: Outlook) -> Step:
        """Live rows first, as the mask of the MC2 kernels wants it. All groups take the bucket of the largest."""
        running, size = self.running, bucket_of(agreed.num_rows, self.buckets)
        batch = self._build("decode", [sequence.span(1) for sequence in running], Outlook(DECODE, size, size))
        return Step(batch, running, torch.arange(len(running)), [(sequence, 1) for sequence in running], 0)

    def _build(self, phase: Phase, spans: list[Span], agreed: Outlook) -> Batch:
        """Rows that belong to nobody follow: in decode up to the bucket, in prefill one if there is no other."""
        rows = agreed.num_rows if phase == "decode" else 1
        dead = [dead_span(row, self.block_size) for row in range(len(spans), rows)]
        return build_batch(
            phase,
            spans + dead,
            block_size=self.block_size,
            max_blocks=self.max_blocks,
            causal_mask=self.causal_mask if phase == "prefill" else None,
            num_active=len(spans),
            most_tokens=agreed.num_tokens,
            num_rows=agreed.num_rows,
        )
