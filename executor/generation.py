# SPDX-License-Identifier: Apache-2.0
"""The loop: take a step, choose tokens, stop what is finished, until every request is answered."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from executor.model_runner import ModelRunner
from executor.parallel.world import agree
from executor.plan import Plan
from executor.sampler import Sampler
from executor.scheduler import Request, Scheduler, Sequence, Step
from executor.text import IdCodec, StopMatcher, TextCodec, TokenStream

OnText = Callable[[int, str, bool], None]


@dataclass
class Answer:
    """What came of one request. Times are seconds since ``generate`` was called.

    ``stop_reason``: ``eos``, ``stop`` (a stop string), ``length`` (max_new_tokens) or ``context`` (the longest
    sequence was reached first).
    """

    number: int
    prompt_tokens: int
    output: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: str = ""
    started: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token, waiting in the queue included."""
        return self.token_times[0]


@dataclass
class Tally:
    """Counts over a run, for the report."""

    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    seconds: float = 0.0

    def add(self, step: Step, seconds: float) -> None:
        self.prompt_tokens += step.num_prompt_tokens
        if step.batch.phase == "prefill":
            self.prefill_steps += 1
            self.prefill_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds


class _Ear:
    """Turns the ids of one answer into text as they come, and knows when a stop string was said."""

    def __init__(self, codec: TextCodec | IdCodec | None, stop: Many[str]) -> None:
        self.stream = TokenStream(codec) if codec is not None else None
        self.matcher = StopMatcher(list(stop))

    def push(self, token: int) -> tuple[str, bool]:
        return self.matcher.push(self.stream.push(token)) if self.stream is not None else ("", False)

    def flush(self) -> str:
        if self.stream is None:
            return ""
        text, stopped = self.matcher.push(self.stream.flush())
        return text if stopped else text + self.matcher.flush()


def new_scheduler(plan: Plan, causal_mask: torch.Tensor) -> Scheduler:
    return Scheduler(
        batch_size=plan.batch_size,
        num_blocks=plan.memory.num_blocks,
        block_size=plan.block_size,
        max_seq_len=plan.max_seq_len,
        max_prefill_tokens=plan.run.scheduler.max_prefill_tokens,
        causal_mask=causal_mask,
    )


def generate(
    runner: ModelRunner,
    requests: Many[Request],
    *,
    vocab_limit: int,
    codec: TextCodec | IdCodec | None = None,
    stop: Many[str] = (),
    on_text: OnText = lambda number, text, done: None,
    after_step: Callable[[Scheduler], None] = lambda scheduler: None,
) -> tuple[list[Answer], Tally]:
    """Answer ``requests``; the answers are in their order.

    Args:
        vocab_limit: ids from here on do not exist in the tokenizer and are never chosen.
        codec: turns ids into text; without it answers carry ids only, and ``stop`` strings cannot be seen.
        on_text: called with (request number, newly finished text, whether the answer is complete).
        after_step: called after every step, for tests of invariants.
    Raises:
        UserError: a request cannot be served, or the model's logits are not finite.
    """
    scheduler, sampler, tally = new_scheduler(runner.plan, runner.causal_mask), Sampler(vocab_limit), Tally()
    sequences = [scheduler.add(request) for request in requests]
    answers = [Answer(s.number, len(s.request.prompt)) for s in sequences]
    ears = [_Ear(codec, stop) for _ in sequences]
    start = time.perf_counter()
    while not scheduler.idle:
        before = time.perf_counter()
        step = scheduler.next_step()
        tokens = _next_tokens(runner, sampler, step)
        now = time.perf_counter()
        tally.add(step, now - before)
        for sequence, count in step.cached:
            if sequence.num_cached == 0:
                answers[sequence.number].started = before - start
            sequence.num_cached += count
        for sequence, token in zip(step.sequences, tokens):
            sequence.output.append(token)
            answer = answers[sequence.number]
            answer.output.append(token)
            answer.token_times.append(now - start)
            answer.stop_reason = _listen(sequence, token, ears[sequence.number], answer, on_text)
            if answer.stop_reason:
                scheduler.finish(sequence)
        after_step(scheduler)
    tally.seconds = time.perf_counter() - start
    return answers, tally


def _next_tokens(runner: ModelRunner, sampler: Sampler, step: Step) -> list[int]:
    logits = runner.step(step.batch)
    wanted = logits[step.rows.to(logits.device)]
    # in prefill every row belongs to a request, also one that ends a chunk; in decode only the wanted ones do
    prefill = step.batch.phase == "prefill"
    if not bool((logits if prefill else wanted).isfinite().all()):
        rows = torch.arange(step.batch.num_tokens) if prefill else step.rows
        raise runner.explain_non_finite(step.batch, rows.to(logits.device))
    tokens = sampler.sample(
        wanted.cpu(),
        [sequence.request.sampling for sequence in step.sequences],
        [sequence.penalized_history for sequence in step.sequences],
        [sequence.generator for sequence in step.sequences],
    )
    return agree(tokens, runner.device)


def _listen(sequence: Sequence, token: int, ear: _Ear, answer: Answer, on_text: OnText) -> str:
    """Pass the token's text on; returns why the answer ends here, or an empty string."""
    if token in sequence.request.eos_ids:
        reason, text = "eos", ear.flush()
    else:
        text, stopped = ear.push(token)
        reason = "stop" if stopped else ""
        if not stopped and len(sequence.output) == sequence.max_new_tokens:
            short = sequence.max_new_tokens < sequence.request.max_new_tokens
            reason = "context" if short else "length"
            text += ear.flush()
    answer.text += text
    if text or reason:
        on_text(answer.number, text, bool(reason))
    return reason
