# SPDX-License-Identifier: Apache-2.0
"""Text at the border of the engine: prompts in, token ids, and text out in pieces, stopped where asked.

All that knows about tokenizers, chat templates and UTF-8 is here; the rest of the engine sees integers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from executor.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are not (yet) a character
EMPTY_PROMPT = "the prompt is empty: give at least one character that is not white space"


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer and two facts generation needs: which ids end an answer, which ids have a text at all."""

    tokenizer: Any
    eos_ids: frozenset[int]
    vocab_limit: int  # highest id the tokenizer knows, added tokens included, + 1

    @classmethod
    def load(cls, model_dir: Path, model_eos: object, generation_config: Mapping[str, object]) -> "TextCodec":
        """Load from local files only; code that comes with a checkpoint is never run.

        Args:
            model_dir: the checkpoint directory.
            model_eos: ``eos_token_id`` of config.json: an int, a list of ints, or ``None``.
            generation_config: content of generation_config.json (``{}`` if there is none); same key, same
                forms. Qwen3 lists different end tokens in different files, and an answer ends at any of them.

        Raises:
            UserError: no tokenizer there, one that cannot be read, or a malformed eos_token_id.
        """
        pair = [model_dir / "vocab.json", model_dir / "merges.txt"]
        files = [path for path in (model_dir / "tokenizer.json", *pair) if path.is_file()]
        if model_dir / "tokenizer.json" not in files and files != pair:
            raise UserError(
                f"{model_dir}: no tokenizer (looked for tokenizer.json, or vocab.json with merges.txt); "
                "copy the tokenizer files of the model there"
            )
        for path in files:
            if _starts_with(path, b"version https://git-lfs"):
                raise UserError(f"{path}: a git-lfs pointer, not the file; run `git lfs pull` there")
        from transformers import AutoTokenizer  # not on top: it takes seconds, which --help need not wait

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the Rust tokenizer raises bare Exception, transformers many types
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{model_dir}: cannot load the tokenizer ({reason}); check its files") from error
        eos = _eos("config.json", model_eos)
        eos |= _eos("generation_config.json", generation_config.get("eos_token_id"))
        eos |= _eos("tokenizer_config.json", tokenizer.eos_token_id)
        return cls(tokenizer, eos, max(tokenizer.get_vocab().values()) + 1)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], enable_thinking: bool) -> list[int]:
        """Ids of a conversation in the model's chat template, ready for the assistant's next turn.

        Raises:
            UserError: no message, an empty last message, no template, or a template that refuses.
        """
        if not messages or not messages[-1]["content"].strip():
            raise UserError(EMPTY_PROMPT)
        if not self.tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template: set data_config.chat_template=false")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=enable_thinking,
            )
        except TemplateError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the chat template refuses the messages ({reason}); correct them") from error
        return self._encode(text, add_special_tokens=False)  # the template has written them

    def encode_raw(self, text: str) -> list[int]:
        """Ids of ``text`` as it stands, for completion without a template.

        Raises:
            UserError: the prompt is empty.
        """
        if not text.strip():
            raise UserError(EMPTY_PROMPT)
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not _is_utf8(text):
            raise UserError("the prompt holds a lone surrogate (half a character): give valid UTF-8 text")
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens, white space untouched; half a character becomes U+FFFD."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(list(ids), **options)
        return text


def _eos(where: str, value: object) -> frozenset[int]:
    """``eos_token_id`` in any of its three forms as a set."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in listed):
        raise UserError(f"{where}: eos_token_id={value!r} must be a token id, a list of them, or null")
    return frozenset(listed)


def _starts_with(path: Path, prefix: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix


def _is_utf8(text: str) -> bool:
    """False if ``text`` holds lone surrogates, which JSON escapes and undecodable argv smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class TokenStream:
    """Incremental detokenizer: the pieces of ``push`` and a last ``flush`` add up to ``decode`` of all ids.

    A token may end inside a multi-byte character, which decodes to U+FFFD at the end of the text: such an
    end is held back until later tokens complete it. Only a window is decoded per token: the ids not yet
    finished, and the piece before them as context, for decoders that treat the start of a text specially.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._context = 0  # leading ids of the window that belong to earlier pieces
        self._sent = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """Take one id, return the text it finished (often empty)."""
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        finished = text.rstrip(REPLACEMENT)
        piece = finished[self._sent :]
        self._sent += len(piece)
        if piece and finished == text:  # a clean border: the old context has served
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._sent = len(self._codec.decode(self._window))
        return piece

    def flush(self) -> str:
        """The text still held back, as it is; to be called once, after the last id."""
        return self._codec.decode(self._window)[self._sent :]


class StopMatcher:
    """Ends a stream of text pieces before the first stop string that is completed.

    "First" is by where a stop string ends, and of two that end together the longer one: generation stops at
    that very character, whatever the borders of the pieces. The emitted text never holds a stop string.

    Raises:
        UserError: an empty stop string, which would match everywhere.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = list(stop)
        if not all(self._stop):
            raise UserError("sampling_config.stop: a stop string must not be empty; take it off the list")
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece; return the text safe to show, and whether a stop string was found (now or before)."""
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        cut = len(text) - self._undecided(text)
        self._held = text[cut:]
        return text[:cut], False

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        ends = (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop))
        return next(ends, 0)

    def flush(self) -> str:
        """The text held back as a possible stop string, once no more text will come."""
        held, self._held = self._held, ""
        return held


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
        raise UserError(f"{path}: {error.strerror}; data_config.dataset must name a readable file") from None
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
        row = json.loads(line)
        whole_characters = _is_utf8(json.dumps(row, ensure_ascii=False))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno}); write one object") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise UserError(f"{where}: JSON out of bounds ({error}); write one flat object") from None
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
