# SPDX-License-Identifier: Apache-2.0
"""A conversation on standard input: every turn is one request that carries the history."""

import io
import sys

from rich.console import Console

from executor.errors import UserError
from executor.prompts import Prompt
from executor.session import Session


def converse(session: Session, console: Console) -> None:
    """Read a line, stream the answer, until the input ends or says ``/exit``; ``/new`` forgets the history.

    A turn that cannot be served (empty, longer than the context) is reported and does not end the conversation.
    """
    runner, _ = session.load(console)
    for line in session.advice():
        console.print(f"note: {line}", style="yellow", soft_wrap=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not UTF-8 are refused with the prompt
    history: list[dict[str, str]] = []
    turns = 0
    console.print("type a message; /new starts over, /exit or end of input leaves")
    while True:
        console.print("> ", end="")
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line or line.strip() == "/exit":
            return
        if line.strip() == "/new":
            history.clear()
            continue
        messages = [*history, {"role": "user", "content": line.rstrip("\n")}]
        try:
            requests = session.requests([Prompt(messages=tuple(messages))], first=turns)
        except UserError as error:
            console.print(f"error: {error}", style="red", soft_wrap=True)
            continue
        try:
            answers, _ = session.answer(runner, requests, _write)
        except BaseException:
            _write(0, "", True)  # what is said about it begins a line of its own
            raise
        turns += 1
        history = [*messages, {"role": "assistant", "content": answers[0].text}]


def _write(number: int, text: str, done: bool) -> None:
    sys.stdout.write(text + "\n" * done)
    sys.stdout.flush()
