# SPDX-License-Identifier: Apache-2.0
"""Prompts, templates, streaming and stop strings against whole-text oracles and golden strings."""

import importlib.util
import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from executor.errors import UserError
from executor.prompts import Prompt, read_prompts
from executor.text import REPLACEMENT, StopMatcher, TextCodec, TokenStream

SCRIPTS = Path(__file__).parents[2] / "scripts"
CORPUS = [
    "the quick brown fox",
    "the lazy dog's dinner",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u4f60\u4eec\u597d",
]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer of the tiny checkpoints, with its chat template."""
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPTS / "train_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_tokenizer()


@cache
def byte_codec() -> TextCodec:
    """A byte-level BPE, as Qwen3's: most characters outside ASCII take several tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator([*CORPUS, "fox \U0001f98a dog \U0001f436"], trainer)
    tok.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tok.add_tokens([AddedToken("<think>", special=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>")
    return TextCodec(fast, frozenset({fast.eos_token_id}), max(fast.get_vocab().values()) + 1)


@pytest.fixture
def codec(tmp_path) -> TextCodec:
    tiny_tokenizer().save_pretrained(tmp_path)
    return TextCodec.load(tmp_path, 2, {"eos_token_id": [2, 0]})


def shown(codec: TextCodec, ids: list[int]) -> str:
    """The text of ids with special tokens visible."""
    return codec.tokenizer.decode(ids, skip_special_tokens=False)


USER = {"role": "user", "content": "1+1"}
THREE_TURNS = [
    {"role": "system", "content": "Add."},
    USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3"},
]
ONE_TURN_TEXT = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
THREE_TURNS_TEXT = (
    "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    "<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("messages", "thinking", "golden"),
    [
        ([USER], True, ONE_TURN_TEXT),
        ([USER], False, ONE_TURN_TEXT + NO_THOUGHT),
        (THREE_TURNS, True, THREE_TURNS_TEXT),  # the earlier thought is gone
        (THREE_TURNS, False, THREE_TURNS_TEXT + NO_THOUGHT),
    ],
)
def test_chat_golden_strings(codec, messages, thinking, golden):
    ids = codec.encode_chat(messages, enable_thinking=thinking)
    assert shown(codec, ids) == golden
    assert ids.count(1) == golden.count("<|im_start|>")  # tags are whole tokens, each written once


def test_decode_hides_special_tokens_only(codec):
    ids = codec.encode_raw("<|im_start|>a  <think> ,b\n<|im_end|>")
    assert codec.decode(ids) == "a  <think> ,b\n"


def test_raw_and_chat_differ(codec):
    assert shown(codec, codec.encode_raw(" 1+1 ")) == " 1+1 "


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt_is_refused(codec, text):
    with pytest.raises(UserError, match="prompt is empty"):
        codec.encode_raw(text)
    with pytest.raises(UserError, match="prompt is empty"):
        codec.encode_chat([USER, {"role": "user", "content": text}], enable_thinking=False)
    with pytest.raises(UserError, match="prompt is empty"):
        codec.encode_chat([], enable_thinking=False)


def test_half_a_character_is_refused():
    with pytest.raises(UserError, match="lone surrogate"):
        byte_codec().encode_raw("a\ud800")


def test_no_template_says_what_to_set():
    with pytest.raises(UserError, match=r"data_config\.chat_template=false"):
        byte_codec().encode_chat([USER], enable_thinking=False)


def test_a_template_that_refuses_is_one_line(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must\\nalternate') }}")
    codec = TextCodec.load(tmp_path, None, {})
    with pytest.raises(UserError, match=r"refuses the messages \(TemplateError: roles must alternate\)"):
        codec.encode_chat([USER], enable_thinking=False)


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{{ 1 + messages }}", "{{ range(10**9) }}"])
def test_a_template_that_breaks_is_one_line(template, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    codec = TextCodec.load(tmp_path, None, {})
    with pytest.raises(UserError, match=r"^the chat template refuses the messages .* data_config.chat_template=false$"):
        codec.encode_chat([USER], enable_thinking=False)


@pytest.mark.parametrize(
    ("model_eos", "generation", "expected"),
    [
        (None, {}, {2}),  # the tokenizer's own
        (0, {}, {0, 2}),
        ([0, 5], {}, {0, 2, 5}),
        (0, {"eos_token_id": 7}, {0, 2, 7}),
        (None, {"eos_token_id": [2, 0]}, {0, 2}),
        ([3], {"eos_token_id": None}, {2, 3}),
    ],
)
def test_eos_is_the_union_of_all_sources(tmp_path, model_eos, generation, expected):
    tiny_tokenizer().save_pretrained(tmp_path)
    assert TextCodec.load(tmp_path, model_eos, generation).eos_ids == expected


@pytest.mark.parametrize("bad", ["2", [1, "2"], True, -1, 2.0])
def test_a_malformed_eos_names_the_file(tmp_path, bad):
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^config\.json: eos_token_id="):
        TextCodec.load(tmp_path, bad, {})
    with pytest.raises(UserError, match=r"^generation_config\.json: eos_token_id="):
        TextCodec.load(tmp_path, None, {"eos_token_id": bad})


def test_vocab_limit_counts_added_tokens(tmp_path):
    byte_codec().tokenizer.save_pretrained(tmp_path)
    codec = TextCodec.load(tmp_path, None, {})
    assert codec.vocab_limit == 302  # 300 trained, <|im_end|>, <think>
    assert codec.decode([301]) == "<think>"


def test_missing_tokenizer_names_the_directory_and_the_files(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json, or vocab\.json with merges\.txt") as error:
        TextCodec.load(tmp_path, None, {})
    assert str(tmp_path) in str(error.value)
    (tmp_path / "vocab.json").write_text("{}")  # half of the pair is none
    with pytest.raises(UserError, match="no tokenizer"):
        TextCodec.load(tmp_path, None, {})


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11422654\n", "git lfs pull"),
        ("{", "cannot load the tokenizer"),
        ('{"version": "1.0", "model": {"type": "No"}}', "cannot load the tokenizer"),
    ],
)
def test_a_broken_tokenizer_is_one_line(tmp_path, content, match):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=match) as error:
        TextCodec.load(tmp_path, None, {})
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    path = tmp_path / "tokenizer_config.json"
    own_code = {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own_code}))
    with pytest.raises(UserError, match="custom code"):
        TextCodec.load(tmp_path, None, {})
    assert not marker.exists()


def check_stream(codec: TextCodec, ids: list[int]) -> None:
    """After every token exactly the text that can no longer change is out; at the end, all of it."""
    stream, out = TokenStream(codec), ""
    for n, token in enumerate(ids, start=1):
        out += stream.push(token)
        assert out == codec.decode(ids[:n]).rstrip(REPLACEMENT)
    assert out + stream.flush() == codec.decode(ids)


any_text = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab \u4f60\u597d\U0001f98a\ufffd")))


@settings(deadline=None, max_examples=60)
@given(any_text)
def test_stream_of_any_text(text):
    codec = byte_codec()
    ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    check_stream(codec, ids)
    if not any(tag in text for tag in ("<|im_end|>", "<think>")):
        assert codec.decode(ids) == text


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 301), max_size=30))
def test_stream_of_any_ids(ids):
    """Models also write bytes that are no character, and special tokens in between."""
    check_stream(byte_codec(), ids)


def test_no_half_characters_on_the_way():
    codec = byte_codec()
    ids = codec.encode_raw("a\U00020000b")
    assert len(ids) == 6  # nothing like it in the corpus: four byte tokens
    stream = TokenStream(codec)
    assert [stream.push(i) for i in ids] == ["a", "", "", "", "\U00020000", "b"]
    assert stream.flush() == ""


def test_an_unfinished_character_comes_out_at_the_end():
    codec = byte_codec()
    stream = TokenStream(codec)
    assert "".join(stream.push(i) for i in codec.encode_raw("a\U00020000")[:-1]) == "a"
    assert stream.flush() == REPLACEMENT


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2), max_size=12))
def test_stream_with_a_decoder_that_drops_the_first_space(ids):
    """Why the window keeps a piece of context: this decoder treats the first token of a text specially."""
    tok = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, unk_token="c"))
    tok.decoder = decoders.Metaspace()
    check_stream(TextCodec(PreTrainedTokenizerFast(tokenizer_object=tok), frozenset(), 3), ids)


def first_stop(text: str, stop: list[str]) -> int | None:
    """Where to cut: try every end, shortest first, and take the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return end - max(lengths)
    return None


def check_stop(pieces: list[str], stop: list[str]) -> None:
    text, matcher, out, seen, stopped = "".join(pieces), StopMatcher(stop), "", "", False
    for piece in pieces:
        emitted, stopped = matcher.push(piece)
        out, seen = out + emitted, seen + piece
        if stopped:
            break
        held = seen[len(out) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)  # nothing is late
    out += matcher.flush()
    cut = first_stop(text, stop)
    assert stopped == (cut is not None)
    assert out == text[:cut]
    assert not any(s in out for s in stop)


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
    stop=st.lists(st.text("ab", min_size=2, max_size=4), max_size=3),
)
def test_stop_matcher_equals_a_search_of_the_whole_text(pieces, stop):
    check_stop(pieces, stop)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_stop_matcher_on_every_text_of_six_letters(width):
    """All texts over two letters, cut in pieces of ``width``, against all pairs of short stop strings."""
    stops = ["".join(s) for n in (1, 2, 3) for s in itertools.product("ab", repeat=n)]
    for letters in itertools.product("ab", repeat=6):
        pieces = ["".join(letters[i : i + width]) for i in range(0, 6, width)]
        for pair in itertools.combinations(stops, 2):
            check_stop(pieces, list(pair))


def test_stop_matcher_by_hand():
    matcher = StopMatcher(["\n\nQ:", "END"])
    assert matcher.push("4\n") == ("4", False)
    assert matcher.push("\nE") == ("\n\n", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("D of it") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match=r"sampling_config\.stop"):
        StopMatcher(["a", ""])


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_read_txt(tmp_path):
    path = written(tmp_path, "q.txt", "\ufeff one\r\n\n  \ntwo\u2028still two\n")
    assert read_prompts(path) == [Prompt(text=" one"), Prompt(text="two\u2028still two")]


def test_read_jsonl(tmp_path):
    rows = [
        {"prompt": "1+1", "answer": "2", "max_new_tokens": 8},
        {"messages": THREE_TURNS, "answer": None},
        {"prompt": "\u4f60\u2028\u597d"},
    ]
    path = written(tmp_path, "q.JSONL", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_prompts(path) == [
        Prompt(text="1+1", answer="2", max_new_tokens=8),
        Prompt(messages=tuple(THREE_TURNS)),
        Prompt(text="\u4f60\u2028\u597d"),
    ]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ('{"prompt": ', "not JSON"),
        ("[1]", "JSON object, not list"),
        ("{}", "exactly one of"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "exactly one of"),
        ('{"prompt": "a", "sysprompt": "b"}', "unknown field 'sysprompt'"),
        ('{"prompt": 3}', "'prompt' must be a string"),
        ('{"prompt": " "}', "'prompt' must be a string that is not empty"),
        ('{"prompt": "a", "answer": 3}', "'answer' must be a string, not int"),
        ('{"prompt": "a", "max_new_tokens": 0}', "'max_new_tokens' must be an integer >= 1"),
        ('{"prompt": "a", "max_new_tokens": true}', "'max_new_tokens' must be an integer >= 1"),
        ('{"prompt": "a", "max_new_tokens": 1.5}', "'max_new_tokens' must be an integer >= 1"),
        ('{"messages": "hi"}', "'messages' must be a list"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["hi"]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "no others"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot' must be one of system, user"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "must be one of system, user"),
        ('{"messages": [{"role": "user", "content": null}]}', "'content' must be a string, not NoneType"),
        ('{"messages": [{"role": "user", "content": ""}]}', "last message is empty"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ("[" * 100_000, "JSON"),
        ('{"prompt": "a", "max_new_tokens": ' + "9" * 5000 + "}", "not a usable JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "key 'prompt' stands there twice"),
    ],
)
def test_a_bad_row_names_file_line_and_fault(tmp_path, row, match):
    path = written(tmp_path, "q.jsonl", '{"prompt": "fine"}\n\n' + row + "\n")
    with pytest.raises(UserError, match=match) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_bad_file_is_one_line(tmp_path, suffix):
    with pytest.raises(UserError, match="No such file"):
        read_prompts(tmp_path / f"none{suffix}")
    (tmp_path / f"dir{suffix}").mkdir()
    with pytest.raises(UserError, match="directory"):
        read_prompts(tmp_path / f"dir{suffix}")
    for content in ("", " \n\n", "\ufeff"):
        with pytest.raises(UserError, match="holds no prompt"):
            read_prompts(written(tmp_path, f"empty{suffix}", content))
    bad = written(tmp_path, f"latin{suffix}", b"\xef\xbb\xbfabc\nd\xe9j\xe0\n")
    with pytest.raises(UserError, match=rf"{suffix}:2: not UTF-8 at byte offset 8;"):
        read_prompts(bad)


def test_other_kinds_of_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"use \.txt .* or \.jsonl"):
        read_prompts(written(tmp_path, "q.csv", "a,b"))
