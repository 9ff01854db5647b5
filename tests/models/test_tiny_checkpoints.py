# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoints answer held-out questions exactly, and token for token as transformers does."""

import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from rich.console import Console

from executor.config import RunConfig
from executor.evaluation import final_answer, score
from executor.generation import generate
from executor.prompts import read_prompts
from executor.session import Session
from tests.models import checkpoints as ck

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = read_prompts(ROOT / "assets/heldout.jsonl")


def answers_of(kind: str, questions, thinking: bool):
    overrides = [f"model_config.enable_thinking={str(thinking).lower()}", "scheduler_config.batch_size=8"]
    session = Session.open(RunConfig.load(ROOT / f"configs/qwen3_{kind}_tiny.yaml", overrides))
    requests = session.requests(questions)
    runner, _ = session.load(Console(quiet=True))
    answers, _ = generate(runner, requests, vocab_limit=session.vocab_limit, codec=session.codec)
    return requests, answers


@torch.no_grad()
def transformers_tokens(kind: str, requests) -> list[list[int]]:
    """Greedy answers of ``generate``; prompts of one length form a batch, so that nothing is padded."""
    model = ck.load(ROOT / f"assets/qwen3_{kind}_tiny", torch.float32)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
        groups[len(request.prompt)].append(i)
    tokens: list[list[int]] = [[] for _ in requests]
    for length, members in groups.items():
        ids = torch.tensor([requests[i].prompt for i in members])
        out = model.generate(ids, max_new_tokens=requests[0].max_new_tokens, do_sample=False)
        ends = set(model.generation_config.eos_token_id)
        for i, row in zip(members, out[:, length:].tolist()):
            stop = next((n for n, token in enumerate(row) if token in ends), len(row) - 1)
            tokens[i] = row[: stop + 1]
    return tokens


def test_questions_are_held_out():
    """500 different prompts, all of the kind that the training script never shows the model."""
    assert len({q.text for q in QUESTIONS}) == len(QUESTIONS) == 500
    assert all(zlib.crc32(q.text.encode()) % 10 == 0 for q in QUESTIONS)
    kinds = [q.text.split()[0] if " " in q.text else "+" if "+" in q.text else "-" for q in QUESTIONS]
    assert min(kinds.count(kind) for kind in ("+", "-", "reverse", "sort")) > 50


def test_answers_in_the_file_are_right():
    for question in QUESTIONS:
        word = question.text.split()[-1]
        if question.text.startswith("reverse"):
            assert question.answer == word[::-1]
        elif question.text.startswith("sort"):
            assert question.answer == "".join(sorted(word))
        else:
            a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)", question.text).groups()
            assert int(question.answer) == int(a) + (int(b) if sign == "+" else -int(b))


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_exact_on_held_out_questions_and_equal_to_transformers(kind):
    requests, answers = answers_of(kind, QUESTIONS, thinking=False)
    result = score([q.answer for q in QUESTIONS], [final_answer(a.text) for a in answers])
    print(f"{kind}: {result.exact} of {result.total} exact")
    assert result.share >= 0.99
    assert {a.stop_reason for a in answers} == {"eos"}
    assert [a.output for a in answers] == transformers_tokens(kind, requests)


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_thinking_mode_equals_transformers(kind):
    requests, answers = answers_of(kind, QUESTIONS[:40], thinking=True)
    assert [a.output for a in answers] == transformers_tokens(kind, requests)
    assert all(a.text.startswith("<think>") and "</think>" in a.text for a in answers)
