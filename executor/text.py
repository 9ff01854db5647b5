# SPDX-License-Identifier: Apache-2.0
"""Text at the border of the engine: to token ids, and back in pieces, stopped where asked.

All that knows about tokenizers and chat templates is here; the rest of the engine sees integers.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.errors import UserError
from executor.prompts import is_utf8

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
        except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
            reason = " ".join(str(error).split())
            raise UserError(
                f"the chat template refuses the messages ({type(error).__name__}: {reason}); correct them, or set "
                "data_config.chat_template=false"
            ) from error
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
        if not is_utf8(text):
            raise UserError("the prompt holds a lone surrogate (half a character): give valid UTF-8 text")
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
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


class IdCodec:
    """Stands in for a tokenizer where only shapes are timed: a prompt becomes ``length`` random ids (another draw for
    each), an answer reads as its ids, and nothing ends it early."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_limit = vocab_size
        self._length = length
        self._random = random.Random(0)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], enable_thinking: bool) -> list[int]:
        return self.encode_raw("")

    def encode_raw(self, text: str) -> list[int]:
        return [self._random.randrange(self.vocab_limit) for _ in range(self._length)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids)


class TokenStream:
    """Incremental detokenizer: the pieces of ``push`` and a last ``flush`` add up to ``decode`` of all ids.

    A token may end inside a multi-byte character, which decodes to U+FFFD at the end of the text: such an
    end is held back until later tokens complete it. Only a window is decoded per token: the ids not yet
    finished, and the piece before them as context, for decoders that treat the start of a text specially.
    """

    def __init__(self, codec: TextCodec | IdCodec) -> None:
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
