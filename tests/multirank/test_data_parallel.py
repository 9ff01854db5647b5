# SPDX-License-Identifier: Apache-2.0
"""Attention groups with requests of their own that come at different times, or not at all, say what a single rank says
to each request alone; and they stay in step."""

import pytest
import torch.distributed as dist

from executor.batch import Span, build_batch, dead_span
from executor.engine import Engine
from executor.errors import UserError
from executor.generation import generate
from executor.scheduler import Request
from tests.models import checkpoints as ck
from tests.multirank.ranks import run
from tests.multirank.test_layouts import ROOT

NEW = 5
P = ck.random_prompts([3, 37, 8, 1, 30, 50, 12, 5], vocab=100, seed=5)
# attention group -> (step at which a request arrives, its prompt)
ARRIVALS = {
    "staggered": {0: [(0, P[0]), (0, P[1]), (9, P[2])], 1: [(2, P[3])], 2: [(4, P[4]), (5, P[5])], 3: [(12, P[6])]},
    "three of four idle": {2: [(0, P[4]), (1, P[0])]},
    "one still prefilling": {0: [(0, P[0])], 1: [(0, P[2])], 3: [(1, P[5]), (1, P[1])]},  # in chunks, others decode
    "a gap in which nobody has work": {1: [(0, P[3])], 3: [(20, P[7])]},
}
STEPS = 45  # enough for all; those after the last answer have nothing to do


def made(kind, world, eplb=False, **parallel):
    overrides = {f"parallel__{key}": value for key, value in parallel.items()}
    return ck.runner(
        ROOT / f"assets/qwen3_{kind}_tiny",
        parallel__world_size=world,
        scheduler__max_seq_len=96,
        scheduler__batch_size=4 if eplb else 8,
        model__force_eplb=eplb,
        scheduler__max_prefill_tokens=20,
        **overrides,
    )


def serve(runner, arrivals) -> dict:
    """Outputs by (group, number), the phase of every step that ran, and the tally of this rank."""
    engine, group = Engine(runner, vocab_limit=108), runner.groups.attn_dp
    mine, sequences, phases = arrivals.get(group.rank, []), [], []
    finished = {}
    step = runner.step

    def watched(batch):
        phases.append(batch.phase)
        return step(batch)

    runner.step = watched
    for now in range(STEPS):
        sequences += [engine.add(Request(prompt=p, max_new_tokens=NEW)) for at, p in mine if at == now]
        for sequence, _ in engine.step() or ():
            if len(sequence.output) == NEW:
                finished[sequence.number] = sequence.output
                engine.finish(sequence)
    engine.scheduler.check()
    runner.step = step
    outputs = {(group.rank, number): output for number, output in finished.items()}
    return {
        "outputs": outputs,
        "phases": phases,
        "agreements": engine.tally.agreements,
        "idle": engine.tally.idle_steps,
    }


def observe(kind, world, layouts) -> list[dict]:
    """For each layout and arrival pattern: outputs of all groups, and what every rank counted."""
    found = []
    for layout in layouts:
        runner = made(kind, world, **layout)
        for name, arrivals in ARRIVALS.items():
            dp = runner.groups.attn_dp.size
            folded: dict[int, list] = {}  # fewer groups than the pattern has: some take two groups' requests
            for group, asked in arrivals.items():
                folded.setdefault(group % dp, []).extend(asked)
            here, everywhere = serve(runner, folded), [None] * world
            dist.all_gather_object(everywhere, here)
            outputs = {}
            for rank in everywhere:
                outputs.update({f"{g},{n}": ids for (g, n), ids in rank["outputs"].items()})
            found.append(
                {
                    "layout": layout,
                    "name": name,
                    "prompts": {f"{g},{n}": p for g, asked in folded.items() for n, p in enumerate(_order(asked))},
                    "outputs": outputs,
                    "phases": [rank["phases"] for rank in everywhere],
                    "agreements": [rank["agreements"] for rank in everywhere],
                    "idle": [rank["idle"] for rank in everywhere],
                }
            )
    return found


def _order(asked):
    """Prompts in the order of their arrival, as the engine numbers them."""
    return [p for now in range(STEPS) for at, p in asked if at == now]


LAYOUTS = {
    "moe": [
        {"attn_tp_size": 1, "moe_ep_size": 4},  # MC2 in decode
        {"attn_tp_size": 1, "moe_ep_size": 4, "moe_decode_strategy": "ep_allgather"},
        {"attn_tp_size": 2, "moe_ep_size": 4, "moe_prefill_strategy": "ep_double_routing", "embed_tp_size": 4},
        {"attn_tp_size": 2, "moe_tp_size": 4, "lmhead_tp_size": 4},
    ],
    "dense": [{"attn_tp_size": 1, "dense_tp_size": 4}],
}


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_groups_with_their_own_requests(kind):
    alone = made(kind, 1)
    expected = {}
    for prompt in P:
        (answer,), _ = generate(alone, [Request(prompt=prompt, max_new_tokens=NEW)], vocab_limit=108)
        expected[tuple(prompt)] = answer.output
    for seen in run(4, observe, kind, 4, LAYOUTS[kind]):
        where = f"{seen['layout']}, {seen['name']}"
        assert seen["outputs"] == {key: expected[tuple(p)] for key, p in seen["prompts"].items()}, where
        assert all(phases == seen["phases"][0] for phases in seen["phases"]), where  # all prefill if one does
        assert {"prefill", "decode"} <= set(seen["phases"][0]), where
        assert seen["agreements"] == [STEPS] * 4, where  # one per step, no more
        assert max(seen["idle"]) > 0, where


def misfortune(kind, layout) -> list[list[str]]:
    """What every rank says when one attention group has a request that can never be served, and when the embedding
    that only one group's prompt uses is NaN."""
    runner = made(kind, 4, **layout)
    said = []
    too_long = [Request(prompt=p, max_new_tokens=NEW) for p in (P[0], P[2], [5] * 96, P[3])]
    for poisoned, requests in ((False, too_long), (True, [Request(prompt=[9], max_new_tokens=NEW), *too_long[1:2]])):
        if poisoned:
            mine = runner.model.embed_tokens.mine
            if 9 in mine:
                runner.model.embed_tokens.weight.data[9 - mine.start] = float("nan")
        try:
            generate(runner, requests, vocab_limit=108)
            message = "nothing"
        except UserError as error:
            message = str(error)
        said.append([None] * 4)
        dist.all_gather_object(said[-1], message)
    return said


def test_what_stops_one_group_stops_all_with_the_same_words():
    layout = {"attn_tp_size": 2, "moe_ep_size": 4, "embed_tp_size": 4}
    refused, poisoned = run(4, misfortune, "moe", layout)
    assert refused == [refused[0]] * 4
    assert refused[0].startswith("prompt 3 has 96 tokens")  # of all requests, not of one group's
    assert poisoned == [poisoned[0]] * 4
    assert poisoned[0] == "logits are not finite; the first layer with NaN or infinity is model.embed_tokens"


def rows_at_experts() -> list[list[int]]:
    """Rows that each rank's experts get when one group prefills 40 tokens and three are idle, and in a decode step of
    one token per rank whose experts are dealt out."""
    found = []
    twice = {"moe_prefill_strategy": "ep_double_routing", "moe_decode_strategy": "ep_double_routing"}
    for eplb in (False, True):
        runner = made("moe", 4, attn_tp_size=1, moe_ep_size=4, eplb=eplb, **twice)
        counted = []
        experts = runner.model.layers[0].mlp.experts
        experts.register_forward_hook(lambda module, args, out, seen=counted: seen.append(int(args[1].sum())))
        if eplb:
            runner.warm_up()  # first a decode step
            counted = counted[:1]
        else:
            busy = dist.get_rank() == 2
            span = Span(P[1], 0, [5, 6, 7]) if busy else dead_span(0, 16)
            batch = build_batch(
                "prefill",
                [span],
                block_size=16,
                max_blocks=runner.plan.max_blocks,
                causal_mask=runner.causal_mask,
                num_active=int(busy),
                most_tokens=len(P[1]),
                num_rows=1,
            )
            runner.step(batch)
        found.append([None] * 4)
        dist.all_gather_object(found[-1], counted)
    return [[n for rank in ranks for n in rank] for ranks in found]


def test_rows_of_nobody_and_balanced_rows_are_dealt_out():
    idle, balanced = run(4, rows_at_experts)
    alone = 2 * len(P[1])  # two experts per token: what the busy group brings, and what each idle one pads with
    assert sum(idle) == 4 * alone
    # the three idle groups' rows lie evenly; sent to one pair of experts they would be up to all of 3 * alone
    assert max(idle) - min(idle) <= alone
    assert balanced == [2, 2, 2, 2]  # one token per rank, two experts each, eight experts
