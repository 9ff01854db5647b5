# SPDX-License-Identifier: Apache-2.0
"""Prefill with tokens split over four ranks, then tensor-parallel decode with rows of the same ``o_proj``: prompts of
any length, also shorter than the group, give the logits of one rank."""

import pytest
import torch

from tests.models import checkpoints as ck
from tests.multirank.ranks import run

LENGTHS = [1, 3, 7, 17, 600]
DECODE = 3
FP32 = 1e-4  # partial sums of the ranks are added in another order
SPLIT = {"attn_tp_size": 4, "embed_tp_size": 4, "lmhead_tp_size": 4, "sequence_parallel_prefill": True}


def observe(folder, world: int, dtype: str, parallel: dict, lengths=tuple(LENGTHS)) -> list[torch.Tensor]:
    """Per length the logits of a prefill of that many tokens and of each decode step after it."""
    overrides = {f"parallel__{key}": value for key, value in parallel.items()}
    runner = ck.runner(folder, parallel__world_size=world, model__dtype=dtype, **overrides)
    seen = []
    for length in lengths:
        (prompt,) = ck.random_prompts([length + DECODE], seed=length)
        # one chunk: all of the prompt at once
        steps = ck.step_by_step(runner, [prompt], decode_steps=DECODE, chunks=1)
        seen.append(torch.stack([logits[0].float() for _, logits in steps]))
    return seen


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("moe", {"moe_ep_size": 4, "moe_prefill_strategy": "ep_double_routing"}),
        pytest.param("moe", {"moe_ep_size": 4, "moe_prefill_strategy": "ep_allgather"}, marks=pytest.mark.full),
        pytest.param("moe", {"moe_tp_size": 4}, marks=pytest.mark.full),
        ("dense", {"dense_tp_size": 4}),
    ],
)
def test_any_length(kind, split, tmp_path):
    experts = {"num_experts": 8} if kind == "moe" else {}
    folder = ck.save(ck.make(kind, attention_bias=True, **experts), tmp_path)
    alone = observe(folder, 1, "float32", {})
    for length, got, expected in zip(LENGTHS, run(4, observe, folder, 4, "float32", {**SPLIT, **split}), alone):
        torch.testing.assert_close(got, expected, rtol=0, atol=FP32, msg=lambda m, n=length: f"{n} tokens: {m}")


def test_packed_rows_of_o_proj_are_those_of_the_whole(tmp_path):
    """bfloat16, where a CPU packs both the whole of ``o_proj`` and this rank's rows: as near to float32 as one rank."""
    folder = ck.save(ck.make("dense"), tmp_path)
    short = tuple(LENGTHS[:-1])
    exact = torch.cat(observe(folder, 1, "float32", {}, short))

    def error(found: list[torch.Tensor]) -> float:
        return float((torch.cat(found) - exact).abs().mean())

    one = error(observe(folder, 1, "bfloat16", {}, short))
    four = error(run(4, observe, folder, 4, "bfloat16", {**SPLIT, "dense_tp_size": 4}, short))
    assert four < 2 * one  # sums over ranks are rounded to bfloat16 once more; wrong rows would be 30 times as far
