# SPDX-License-Identifier: Apache-2.0
"""From requests to answers: the engine's steps until every request is answered, tokens turned into text, stop rules.

Attention groups take the requests in turn: request i is served by group i modulo their number.
"""

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field

from executor.engine import Engine, Tally
from executor.model_runner import ModelRunner
from executor.parallel import world
from executor.parallel.groups import Group
from executor.scheduler import Request, Scheduler, Sequence
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
    group = runner.groups.attn_dp
    engine, mine = Engine(runner, vocab_limit), range(group.rank, len(requests), group.size)
    for number, request in enumerate(requests):  # on every rank, so that all refuse the same one
        engine.scheduler.require(request, number)
    sequences = [engine.add(requests[number]) for number in mine]
    answers = [Answer(number, len(s.request.prompt)) for number, s in zip(mine, sequences)]
    ears = [_Ear(codec, stop) for _ in sequences]
    start = time.perf_counter()
    while (chosen := engine.step()) is not None:
        now = time.perf_counter()
        for sequence, token in chosen:
            answer = answers[sequence.number]
            answer.started = sequence.started - start
            answer.output.append(token)
            answer.token_times.append(now - start)
            answer.stop_reason = _listen(sequence, token, ears[sequence.number], answer, on_text)
            if answer.stop_reason:
                engine.finish(sequence)
        after_step(engine.scheduler)
    engine.tally.seconds = time.perf_counter() - start
    return _collected(answers, group, on_text), engine.tally


def _collected(mine: list[Answer], group: Group, on_text: OnText) -> list[Answer]:
    """The answers of all attention groups in the order of the requests, on every rank. Those of other groups were not
    seen while they were made, so their text is passed on now, whole."""
    if group.size == 1:
        return mine
    parts = world.collect(json.dumps([asdict(answer) for answer in mine]), group)
    answers = [Answer(**fields) for part in parts for fields in json.loads(part)]
    own = {answer.number for answer in mine}
    for answer in sorted(answers, key=lambda answer: answer.number):
        if answer.number not in own:
            on_text(answer.number, answer.text, True)
    return sorted(answers, key=lambda answer: answer.number)


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
