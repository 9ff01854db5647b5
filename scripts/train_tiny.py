# SPDX-License-Identifier: Apache-2.0
"""Train the two tiny checkpoints under ``assets/`` from scratch, on the CPU, with transformers.

The task has exact answers, so that a run of any layout or mode can be *checked*, not admired:

    345+678        -> 1023          addition and subtraction of integers of one to three digits (a >= b)
    reverse cabd   -> dbac          two to six letters out of a..j
    sort cabd      -> abcd

A prompt is held out when the CRC-32 of its text is a multiple of 10: no such prompt is ever trained on, and
``assets/heldout.jsonl`` is drawn from them alone. One example in five is asked in thinking mode, where the answer
is first written backwards between think tags (the order in which one adds); one batch in eight has earlier turns.

The shipped files were made by these commands (the thread count matters for the last bits of a sum):

    OMP_NUM_THREADS=1 python scripts/train_tiny.py moe   assets/qwen3_moe_tiny
    OMP_NUM_THREADS=1 python scripts/train_tiny.py dense assets/qwen3_dense_tiny
    python scripts/train_tiny.py questions assets/heldout.jsonl
"""

import argparse
import copy
import json
import math
import os
import random
import string
import sys
import time
import zlib
from pathlib import Path

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>", "\n\n", "user", "assistant", "system", "reverse", "sort"]
LETTERS = "abcdefghij"
# The layout of a conversation is Qwen3's: earlier thoughts are dropped from the history, and thinking is switched
# off by handing the model an empty thought.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and whole tokens for the tags and the words of the task."""
    chars = ["\n", *(c for c in string.printable if c.isprintable())]
    vocab = {tok: i for i, tok in enumerate([*SPECIAL, "<unk>", *WORDS, *chars])}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tok.decoder = decoders.Fuse()
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in WORDS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def question(rng: random.Random) -> tuple[str, str]:
    """A prompt and its exact answer, from the whole space (trained on and held out)."""
    kind = rng.random()
    if kind < 0.6:
        a, b = (rng.randrange(10 ** rng.choice((1, 2, 3, 3))) for _ in range(2))
        if rng.random() < 0.5:
            return f"{a}+{b}", str(a + b)
        return f"{max(a, b)}-{min(a, b)}", str(max(a, b) - min(a, b))
    word = "".join(rng.choice(LETTERS) for _ in range(rng.randrange(2, 7)))
    return (f"reverse {word}", word[::-1]) if kind < 0.8 else (f"sort {word}", "".join(sorted(word)))


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 10 == 0


def draw(rng: random.Random, *, from_held_out: bool) -> tuple[str, str]:
    while True:
        prompt, answer = question(rng)
        if held_out(prompt) == from_held_out:
            return prompt, answer


def example(
    rng: random.Random, tok: PreTrainedTokenizerFast, turns: int, thinking: bool, from_held_out: bool = False
) -> tuple[list[int], int]:
    """Token ids of one conversation, and the position where its last answer starts (the loss starts there)."""
    messages = []
    for turn in range(turns):
        prompt, answer = draw(rng, from_held_out=from_held_out)
        messages.append({"role": "user", "content": prompt})
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": answer})
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    reply = (f"<think>\n{answer[::-1]}\n</think>\n\n" if thinking else "") + answer + "<|im_end|>"
    prompt_ids = tok.backend_tokenizer.encode(text).ids
    return prompt_ids + tok.backend_tokenizer.encode(reply).ids, len(prompt_ids)


def collate(rows: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels ``[rows, longest]``, int64; labels are -100 outside the last answer."""
    longest = max(len(ids) for ids, _ in rows)
    x = torch.full((len(rows), longest), pad)
    y = torch.full((len(rows), longest), -100)
    for i, (ids, start) in enumerate(rows):
        x[i, : len(ids)] = torch.tensor(ids)
        y[i, start : len(ids)] = x[i, start : len(ids)]
    return x, y


@torch.no_grad()
def exact_match(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of rows whose whole answer is predicted (teacher forcing: equal to greedy generation)."""
    predicted = model(x).logits[:, :-1].argmax(-1)
    return ((predicted == y[:, 1:]) | (y[:, 1:] == -100)).all(1).float().mean().item()


def build_model(kind: str, vocab_size: int) -> torch.nn.Module:
    """Widths such that TP and EP of 1, 2, 4 and 8 are legal and an MX slice is a multiple of 64 at TP 4."""
    shared = dict(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shared, intermediate_size=512, tie_word_embeddings=True))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shared,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
            output_router_logits=True,
            router_aux_loss_coef=0.001,
        )
    )


def train(kind: str, folder: Path, steps: int, batch_size: int, lr: float, seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tok = build_tokenizer()
    model = build_model(kind, vocab_size=128)
    average = copy.deepcopy(model)  # exponential moving average of the weights: what is saved
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    started = time.time()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        turns, size = (rng.choice((2, 3)), batch_size // 2) if step % 8 == 7 else (1, batch_size)
        thinking = step % 5 == 4
        x, y = collate([example(rng, tok, turns, thinking) for _ in range(size)], tok.pad_token_id)
        loss = model(x, labels=y).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            decay = min(0.998, step / (step + 10))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        if (step + 1) % 100 == 0:
            print(f"{kind} step {step + 1}/{steps} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            save(average, tok, folder)
            score = exact_match(average, *collate([example(rng, tok, 1, False, True) for _ in range(1000)], 0))
            print(f"{kind} step {step + 1}: {score:.1%} exact on 1000 held-out prompts", flush=True)


def save(model: torch.nn.Module, tok: PreTrainedTokenizerFast, folder: Path) -> None:
    """BF16 safetensors, tokenizer, chat template, and a generation config that says greedy."""
    out = copy.deepcopy(model).to(torch.bfloat16)
    out.config.output_router_logits = False
    out.generation_config = GenerationConfig(do_sample=False, eos_token_id=[2, 0], pad_token_id=0)
    out.save_pretrained(folder)
    tok.save_pretrained(folder)


def write_questions(path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        prompt, answer = draw(rng, from_held_out=True)
        rows[prompt] = answer
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("moe", "dense", "questions"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500, help="number of held-out questions")
    args = parser.parse_args()
    if args.what == "questions":
        write_questions(args.path, args.count, args.seed)
    else:
        train(args.what, args.path, args.steps, args.batch_size, args.lr, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
