# SPDX-License-Identifier: Apache-2.0
"""What a layer communicates, counted by a spy, is what the table in docs/parallelism.md says: which collectives, over
which groups, and how many elements a rank sends."""

import re
from fractions import Fraction

import pytest

from executor.batch import Span, build_batch
from executor.config import RunConfig
from executor.layers.decoder import DecoderLayer
from executor.model_runner import plan_run
from executor.moe import ep_mc2 as mc2
from executor.ops import uncombined
from executor.ops.reference.moe_distribute import ASSIST
from executor.parallel.groups import Group
from tests.models import checkpoints as ck
from tests.multirank.ranks import run
from tests.multirank.test_layouts import ROOT

WORLD, TOKENS = 4, 16  # so many that every share of tokens reaches all experts equally often
ROW = re.compile(r"\| (.+) \| (both|prefill|decode) \| `(.+?)` \| (.*?) ?\| (.*?) ?\| `(.+?)` \|")
OUTSIDE = re.compile(r"\| (.+) \| (both|prefill|decode) \| `(.+?)` \| (.*?) \|")


def table() -> list[dict]:
    """One row per layout and phase. Raises AttributeError for a line that is not understood."""
    section = (ROOT / "docs/parallelism.md").read_text().split("## Collectives per layer")[1].split("## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!layout)", line)]
    assert len(lines) > 10
    rows = []
    for line in lines:
        if match := ROW.fullmatch(line):
            name, phases, config, attention, feed_forward, elements = match.groups()
            parts = {"attention": attention, "feed-forward": feed_forward}
        else:
            name, phases, config, outside = OUTSIDE.fullmatch(line).groups()
            parts, elements = {"outside": outside}, None
        for phase in ("prefill", "decode") if phases == "both" else (phases,):
            row = {
                "name": f"{name}, {phase}",
                "phase": phase,
                "settings": dict(pair.split("=") for pair in config.split(", ")),
                "elements": elements,
            }
            rows.append({**row, **{part: [c for c in calls.split(", ") if c] for part, calls in parts.items()}})
    return rows


class Spy:
    """Wraps the collectives of every Group, and notes what is called inside which part of a layer."""

    def __init__(self) -> None:
        self.where = "outside"
        self.mc2 = ""
        self.calls: dict[str, list[str]] = {"attention": [], "feed-forward": [], "outside": []}
        self.elements: dict[str, Fraction] = dict.fromkeys(self.calls, Fraction(0))
        self.undo: list = []

    def note(self, operation: str, group: str, elements: Fraction) -> None:
        self.calls[self.where].append(f"{operation} {group}")
        self.elements[self.where] += elements

    def replace(self, owner, name: str, wrapper) -> None:
        original = getattr(owner, name)
        self.undo.append((owner, name, original))
        setattr(owner, name, wrapper(original))

    def __enter__(self):
        def collective(operation: str, sent):
            def wrapper(original):
                def call(group, x, *counts):
                    if group.size > 1:
                        self.note(operation, group.name, sent(group, x, *counts))
                    return original(group, x, *counts)

                return call

            return wrapper

        def share(group, x):
            return Fraction(x.numel() * (group.size - 1), group.size)

        def to_others(group, x, send=None, receive=None):
            if send is None:
                return share(group, x)
            return Fraction(sum(n for r, n in enumerate(send) if r != group.rank) * x[:1].numel())

        self.replace(Group, "all_reduce", collective("all_reduce", lambda group, x: 2 * share(group, x)))
        self.replace(
            Group, "all_gather", collective("all_gather", lambda group, x: Fraction(x.numel() * (group.size - 1)))
        )
        self.replace(Group, "reduce_scatter", collective("reduce_scatter", share))
        self.replace(Group, "all_to_all", collective("all_to_all", to_others))

        def dispatch(original):
            def call(strategy, x, ids, weights, batch):
                ep, self.mc2 = strategy.ep, strategy.ep.name
                away = int((ids // (strategy.num_experts // ep.size) != ep.rank).sum())
                self.note("dispatch", self.mc2, Fraction(away * x.shape[1]))
                return original(strategy, x, ids, weights, batch)

            return call

        def combine(original):
            def call(rows, ids, weights, active, ranks, route):
                """What goes back is what came from other ranks, as dispatch has written beside each row."""
                arrived = int(route.counts[ranks.num_experts - 1])
                source = route.assist.view(-1, ASSIST)[:arrived, 0]
                self.note("combine", self.mc2, Fraction(int((source != ranks.rank).sum()) * rows.shape[1]))
                return original(rows, ids, weights, active, ranks, route)

            return call

        self.replace(mc2.DispatchCombine, "dispatch", dispatch)
        self.replace(uncombined, "distribute_combine", combine)

        def inside(part: str):
            def wrapper(original):
                def call(*args):
                    self.where = part
                    try:
                        return original(*args)
                    finally:
                        self.where = "outside"

                return call

            return wrapper

        for name in ("attn_compute", "attn_reduce"):
            self.replace(DecoderLayer, name, inside("attention"))
        for name in ("ffn_compute", "ffn_reduce"):
            self.replace(DecoderLayer, name, inside("feed-forward"))
        return self

    def __exit__(self, *exception) -> None:
        for owner, name, original in reversed(self.undo):
            setattr(owner, name, original)


def model_of(row: dict) -> str:
    """Which of the tiny models: rows about experts name a size of theirs."""
    return "moe" if row["settings"].keys() & {"moe_tp_size", "moe_ep_size"} else "dense"


def watch(rows: list[dict]) -> list[dict]:
    """Per row of the table: the collectives of one layer, the elements sent, and the letters of its formula."""
    found = []
    for row in rows:
        kind = model_of(row)
        overrides = {
            f"parallel__{key}": value == "true"
            if value in ("true", "false")
            else int(value)
            if value.isdigit()
            else value
            for key, value in row["settings"].items()
        }
        runner = ck.runner(
            ROOT / f"assets/qwen3_{kind}_tiny",
            model__force_eplb=True,
            model__unfused=("combine_add_rms_norm",),  # which would be counted with the next layer's attention
            parallel__world_size=WORLD,
            scheduler__batch_size=TOKENS * WORLD // overrides["parallel__attn_tp_size"],
            scheduler__max_seq_len=96,
            **overrides,
        )
        size = runner.plan.block_size
        if row["phase"] == "prefill":
            spans = [Span(list(range(2, 2 + TOKENS)), 0, [5])]
        else:
            spans = [Span([2], 0, [5 + i]) for i in range(TOKENS)]
        mask = runner.causal_mask if row["phase"] == "prefill" else None
        batch = build_batch(row["phase"], spans, block_size=size, max_blocks=runner.plan.max_blocks, causal_mask=mask)
        with Spy() as spy:
            runner.step(batch)
        config, groups = runner.plan.config, runner.groups
        letters = {
            "T": TOKENS,
            "t": TOKENS // groups.attn_tp.size,
            "P": groups.attn_tp.size,
            "D": groups.dense_tp.size,
            "M": groups.moe_tp.size,
            "E": groups.moe_ep.size,
            "H": config.hidden_size,
            "A": config.num_attention_heads * config.head_dim,
            "K": config.moe.num_experts_per_tok if config.moe else 0,
            "X": config.moe.num_experts if config.moe else 0,
        }
        total = spy.elements["attention"] + spy.elements["feed-forward"]
        found.append(
            {
                "layers": config.num_hidden_layers,
                "attention": spy.calls["attention"],
                "feed-forward": spy.calls["feed-forward"],
                "outside": spy.calls["outside"],
                "elements": [total.numerator, total.denominator],
                "letters": letters,
            }
        )
    return found


def test_collectives_of_a_layer_are_those_of_the_table():
    rows = table()
    assert {"prefill", "decode"} == {row["phase"] for row in rows}
    for row, seen in zip(rows, run(WORLD, watch, rows), strict=True):
        if row["elements"] is None:
            assert seen["outside"] == row["outside"], row["name"]
            continue
        for part in ("attention", "feed-forward"):
            assert seen[part] == row[part] * seen["layers"], row["name"]
        expected = eval(row["elements"], {}, {name: Fraction(n) for name, n in seen["letters"].items()})
        assert Fraction(*seen["elements"]) == expected * seen["layers"], row["name"]


@pytest.mark.parametrize("row", [row for row in table() if row["elements"]], ids=lambda row: row["name"])
def test_a_cell_of_the_table_can_be_set_on_the_command_line(row):
    """As the example above the table does, for the tiny recipes. A layer's groups are those that it communicates in."""
    pairs = [f"parallel_config.{key}={value}" for key, value in {"world_size": WORLD, **row["settings"]}.items()]
    _, plan = plan_run(RunConfig.load(ROOT / f"configs/qwen3_{model_of(row)}_tiny.yaml", pairs))
    used = {call.split()[1] for call in row["attention"] + row["feed-forward"]}
    assert used <= {name for name, size in plan.blueprint.groups.sizes().items() if size > 1}
