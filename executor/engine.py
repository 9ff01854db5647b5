# SPDX-License-Identifier: Apache-2.0
"""One step after the other: what to compute, the forward pass, the next tokens.

Every rank runs this loop. The ranks of an attention group schedule alike and take the tokens that its first rank chose.
Attention groups have requests of their own; before each step they agree, in one small collective between hosts, on the
phase and on how many tokens and rows of logits the largest of them has, since their layers exchange tokens.
"""

import time
from dataclasses import dataclass

import torch

from executor.model_runner import ModelRunner
from executor.parallel import world
from executor.plan import Plan
from executor.sampler import Sampler
from executor.scheduler import FAILED, IDLE, Outlook, Request, Scheduler, Sequence, Step


@dataclass
class Tally:
    """Counts over a run, for the report. ``agreements`` counts the collectives by which groups keep in step."""

    prefill_steps: int = 0
    decode_steps: int = 0
    idle_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    agreements: int = 0
    agreement_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, step: Step, seconds: float) -> None:
        self.prompt_tokens += step.num_prompt_tokens
        self.idle_steps += not step.cached
        if step.batch.phase == "prefill":
            self.prefill_steps += 1
            self.prefill_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds


def new_scheduler(plan: Plan, causal_mask: torch.Tensor) -> Scheduler:
    return Scheduler(
        buckets=plan.buckets,
        num_blocks=plan.memory.num_blocks,
        block_size=plan.block_size,
        max_seq_len=plan.max_seq_len,
        max_prefill_tokens=plan.run.scheduler.max_prefill_tokens,
        causal_mask=causal_mask,
    )


class Engine:
    """The requests of this rank's attention group, from ``add`` to ``finish``."""

    def __init__(self, runner: ModelRunner, vocab_limit: int) -> None:
        """Ids from ``vocab_limit`` on do not exist in the tokenizer and are never chosen."""
        self.runner = runner
        self.scheduler = new_scheduler(runner.plan, runner.causal_mask)
        self.sampler = Sampler(vocab_limit)
        self.tally = Tally()
        self.failed = False  # the last step gave a request logits that are not finite
        self.last: Step | None = None

    def add(self, request: Request) -> Sequence:
        """Queue ``request``. Raises UserError if it can never be served."""
        return self.scheduler.add(request)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)

    def step(self) -> list[tuple[Sequence, int]] | None:
        """Take one step, together with all other ranks. Returns the sequences that got a token, with it, which is also
        appended to their output; None when no group has anything to do.

        Raises:
            NonFiniteLogits: the step before produced NaN or infinity for a request, of this group or of another one.
                Only now do all groups know, and can look for the layer together.
        """
        started = time.perf_counter()
        agreed = self._agree(Outlook(FAILED, 0, 0) if self.failed else self.scheduler.prepare())
        if agreed.phase == FAILED and self.last is not None:
            raise self.runner.explain_non_finite(self.last.batch)
        if agreed.phase == IDLE:
            return None
        step = self.last = self.scheduler.next_step(agreed)
        tokens = self._next_tokens(step)
        if self.failed:
            return []
        for sequence, count in step.cached:
            if sequence.num_cached == 0:
                sequence.started = started
            sequence.num_cached += count
        for sequence, token in zip(step.sequences, tokens, strict=True):
            sequence.output.append(token)
        self.tally.add(step, time.perf_counter() - started)
        return list(zip(step.sequences, tokens))

    def _agree(self, outlook: Outlook) -> Outlook:
        group = self.runner.groups.attn_dp
        if group.size == 1:
            return outlook
        started = time.perf_counter()
        agreed = Outlook(*world.largest(list(outlook), group))
        self.tally.agreements += 1
        self.tally.agreement_seconds += time.perf_counter() - started
        return agreed

    def _next_tokens(self, step: Step) -> list[int]:
        logits = self.runner.step(step.batch)
        wanted = logits[step.rows.to(logits.device)]
        # in prefill every row belongs to a request, also one that ends a chunk; in decode only the wanted ones do
        looked_at = logits if step.batch.phase == "prefill" else wanted
        self.failed = bool(step.cached) and not bool(looked_at.isfinite().all())
        if self.failed:
            return []
        tokens = self.sampler.sample(
            wanted.cpu(),
            [sequence.request.sampling for sequence in step.sequences],
            [sequence.penalized_history for sequence in step.sequences],
            [sequence.generator for sequence in step.sequences],
        )
        return world.share(tokens, self.runner.groups.attn_tp)
