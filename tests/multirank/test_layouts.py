# SPDX-License-Identifier: Apache-2.0
"""Every legal layout of the two tiny models gives the logits and tokens of one rank.

A layout is a product of group sizes, whether prefill is sequence parallel, and which strategies exchange tokens.
"""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from executor.generation import generate
from executor.legal_layouts import legal_layouts
from executor.model_runner import plan_run
from executor.sampler import SamplingParams
from executor.scheduler import Request
from tests.models import checkpoints as ck
from tests.multirank.ranks import run

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ck.random_prompts([17, 6, 40, 23, 7, 12, 31, 9], vocab=100)
ODD_PROMPTS = ck.random_prompts([17, 6, 40, 23, 7, 12], vocab=96, seed=1)
ASKED = ck.random_prompts([3, 19, 8, 1, 30], vocab=100, seed=3)
FP32 = 1e-4  # partial sums of the ranks are added in another order
EXCHANGES = ("ep_allgather", "ep_double_routing")


def config_of(kind: str, world: int, layout: dict):
    parallel = {f"parallel__{key}": value for key, value in layout.items()}
    folder = ROOT / f"assets/qwen3_{kind}_tiny"
    return ck.run_config(
        folder, parallel__world_size=world, scheduler__max_seq_len=96, scheduler__batch_size=8, **parallel
    )


def variants(layout: dict, world: int) -> list[dict]:
    """What can be chosen once the sizes are."""
    found = []
    for sequence_parallel in (False, True)[: 1 + (layout["attn_tp_size"] > 1)]:
        sharded, several = layout["attn_tp_size"] < world, layout.get("moe_ep_size", 1) > 1
        prefill = EXCHANGES if several and (sharded or sequence_parallel) else (None,)
        mc2 = ("ep_mc2",) * (layout.get("moe_tp_size") == 1)
        decode = (*mc2, *EXCHANGES) if several and sharded else (None,)
        for first, then in itertools.product(prefill, decode):
            chosen = {"moe_prefill_strategy": first, "moe_decode_strategy": then}
            found.append({"sequence_parallel_prefill": sequence_parallel, **(chosen if several else {})})
    return found


def layouts(kind: str, world: int) -> list[list[dict]]:
    """For every legal product of sizes, all layouts that have it."""
    _, plan = plan_run(config_of(kind, 1, {}))
    return [[{**sizes, **v} for v in variants(sizes, world)] for sizes in legal_layouts(plan.config, world)]


def pairwise(every: list[dict]) -> list[dict]:
    """A greedy selection in which each pair of values of two keys that occurs at all occurs at least once."""

    def pairs(layout):
        return set(itertools.combinations(sorted(layout.items()), 2))

    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        best = max(every, key=lambda layout: len(pairs(layout) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def of_all_groups(runner, own: list[torch.Tensor]) -> list[torch.Tensor]:
    """``[rows, vocab]`` of each step in the order of the prompts, which the attention groups took in turn."""
    parts, dp, tp = [own], runner.groups.attn_dp.size, runner.groups.attn_tp.size
    if dp > 1:
        parts = [None] * (dp * tp)
        dist.all_gather_object(parts, own)
        parts = parts[::tp]
    return [torch.stack(step, 1).flatten(0, 1) for step in zip(*parts)]


def observe(kind: str, world: int, several: list[dict]) -> list[dict]:
    """What a rank sees of each layout: the logits of every step, and greedy and sampled tokens of a small run."""
    seen = []
    for layout in several:
        runner_kind, plan = plan_run(config_of(kind, world, layout))
        runner = runner_kind(plan)
        runner.load_weights()
        own = [logits.clone() for _, logits in ck.step_by_step(runner, PROMPTS, decode_steps=3)]
        sampled = SamplingParams(temperature=1.0, seed=None)  # each rank would draw something else
        tokens = []
        for sampling, new in ((SamplingParams(), 6), (sampled, 2)):
            requests = [Request(prompt=p, max_new_tokens=new, sampling=sampling) for p in ASKED]
            answers, _ = generate(runner, requests, vocab_limit=108, after_step=lambda s: s.check())
            tokens.append([answer.output for answer in answers])
        ranks = [tokens]
        if world > 1:
            ranks = [None] * world
            dist.all_gather_object(ranks, tokens)
        whole = of_all_groups(runner, own)
        seen.append({"steps": whole, "greedy": tokens[0], "all_agree": all(t == tokens for t in ranks)})
    return seen


def check(kind: str, world: int, several: list[dict]) -> None:
    (alone,) = observe(kind, 1, [{}])
    for layout, seen in zip(several, run(world, observe, kind, world, several), strict=True):
        for got, expected in zip(seen["steps"], alone["steps"], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=FP32, msg=lambda m, at=layout: f"{at}: {m}")
        assert seen["greedy"] == alone["greedy"], layout
        assert seen["all_agree"], layout  # also of the sampled tokens
    print(f"{kind}, {world} ranks: {len(several)} layouts equal one rank")


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_layouts_equal_one_rank(kind, world):
    check(kind, world, pairwise([layout for same in layouts(kind, world) for layout in same]))


def observe_odd(world: int, several: list[dict], folder: str, rows: int) -> list[torch.Tensor]:
    """``[steps, rows, vocab]`` logits per layout."""
    found = []
    for layout in several:
        parallel = {f"parallel__{key}": value for key, value in layout.items()}
        runner = ck.runner(Path(folder), parallel__world_size=world, scheduler__batch_size=rows, **parallel)
        own = [logits for _, logits in ck.step_by_step(runner, ODD_PROMPTS[:rows], decode_steps=2)]
        found.append(torch.stack(of_all_groups(runner, own)))
    return found


@pytest.mark.parametrize("world", [3, pytest.param(6, marks=pytest.mark.full)])
def test_groups_that_do_not_nest(world, tmp_path):
    """Three and six ranks: a head over three ranks beside attention groups of two, sparse and dense layers in one
    model, biases, a tied head that is split otherwise than the embedding."""
    options = dict(num_attention_heads=6, num_key_value_heads=3, intermediate_size=96, attention_bias=True)
    model = ck.make("moe", mlp_only_layers=[1], tie_word_embeddings=True, **options)
    folder = str(ck.save(model, tmp_path))
    _, plan = plan_run(ck.run_config(tmp_path))
    several = pairwise([{**sizes, **v} for sizes in legal_layouts(plan.config, world) for v in variants(sizes, world)])
    found = run(world, observe_odd, world, several, folder, world)
    (expected,) = observe_odd(1, [{}], folder, rows=world)
    for layout, got in zip(several, found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=FP32, msg=lambda m, at=layout: f"{at}: {m}")


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_all_products_of_sizes_equal_one_rank(kind, world):
    """Each product of sizes with one of its variants, another one each time."""
    check(kind, world, [same[i % len(same)] for i, same in enumerate(layouts(kind, world))])
