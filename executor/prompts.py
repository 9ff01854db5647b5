# SPDX-License-Identifier: Apache-2.0
"""Prompts from a file: one per line, or JSON objects with conversations, expected answers and lengths."""

import json
from dataclasses import dataclass
from pathlib import Path

from executor.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """One request of a data set: either a conversation (``messages``) or a plain ``text``."""

    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    answer: str | None = None
    max_new_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Read a data set, in file order.

    ``.txt`` holds one prompt per line. ``.jsonl`` holds one object per line with ``prompt`` (a string) or
    ``messages`` (a list of ``{"role", "content"}``), and optionally ``answer`` (a string) and
    ``max_new_tokens`` (an integer >= 1); null counts as absent. Blank lines are skipped, and so is a BOM.

    Raises:
        UserError: anything else, with file and line.
    """
    suffix = path.suffix.lower()
    try:
        data = path.read_bytes()
    except OSError as error:  # no such file, a directory, no permission: strerror says which
        raise UserError(f"{path}: {error.strerror}; name a readable file of prompts") from None
    if suffix not in (".txt", ".jsonl"):
        raise UserError(f"{path}: unknown kind of data set; use .txt (a prompt per line) or .jsonl")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 at byte offset {error.start}; convert the file") from None
    # Not splitlines(): it also cuts at characters, such as U+2028, that may stand inside a prompt.
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    numbered = [(f"{path}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{path}: holds no prompt; put one per line")
    if suffix == ".txt":
        return [Prompt(text=line) for _, line in numbered]
    return [_prompt_of_json(where, line) for where, line in numbered]


def _prompt_of_json(where: str, line: str) -> Prompt:
    """Parse and check one line of a .jsonl data set."""
    try:
        row = json.loads(line, object_pairs_hook=_unique)
        whole_characters = is_utf8(json.dumps(row, ensure_ascii=False))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno}); write one object") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise UserError(f"{where}: not a usable JSON object ({error}); write one flat object") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be a JSON object, not {type(row).__name__}")
    if not whole_characters:
        raise UserError(f"{where}: an escaped lone surrogate is half a character; write the whole one")
    fields = ("prompt", "messages", "answer", "max_new_tokens")
    unknown = sorted(set(row) - set(fields))
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}; allowed are {', '.join(fields)}")
    prompt, messages, answer, limit = (row.get(field) for field in fields)
    if (prompt is None) == (messages is None):
        raise UserError(f"{where}: must have exactly one of the fields 'prompt' and 'messages'")
    if prompt is not None and not (isinstance(prompt, str) and prompt.strip()):
        raise UserError(f"{where}: 'prompt' must be a string that is not empty")
    if answer is not None and not isinstance(answer, str):
        raise UserError(f"{where}: 'answer' must be a string, not {type(answer).__name__}")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UserError(f"{where}: 'max_new_tokens' must be an integer >= 1")
    return Prompt(None if messages is None else _conversation(where, messages), prompt, answer, limit)


def _conversation(where: str, messages: object) -> tuple[dict[str, str], ...]:
    """Check the shape of ``messages``; which role may follow which is for the chat template to say."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: 'messages' must be a list with at least one message")
    for i, message in enumerate(messages):
        here = f"{where}: messages[{i}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UserError(f"{here} must be an object with the fields 'role' and 'content', no others")
        if message["role"] not in ROLES:
            raise UserError(f"{here}: role {message['role']!r} must be one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise UserError(f"{here}: 'content' must be a string, not {type(message['content']).__name__}")
    if not messages[-1]["content"].strip():
        raise UserError(f"{where}: the last message is empty; write its content")
    return tuple(messages)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, in which Python's reader would silently keep the last of two equal keys."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"key {twice!r} stands there twice")
    return dict(pairs)


def is_utf8(text: str) -> bool:
    """False if ``text`` holds lone surrogates, which JSON escapes and undecodable argv smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
