# SPDX-License-Identifier: Apache-2.0
"""What one rank of a shipped recipe computes on: sizes taken from the planned model, steps laid out as it lays them."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from executor.batch import Batch, Phase, Span, build_batch
from executor.config import RunConfig
from executor.layers.decoder import CausalLM
from executor.layers.mlp import MLP
from executor.model_runner import plan_run
from executor.moe.block import MoeBlock
from executor.ops.attention import causal_mask
from executor.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
RECIPES = tuple(path.stem for path in sorted((ROOT / "configs").glob("*.yaml")))


def plan_of(recipe: str) -> tuple[Plan, CausalLM]:
    """The plan for a card, and rank 0's model on the meta device. Nothing is allocated, no card is asked for."""
    path = ROOT / f"configs/{recipe}.yaml"
    overrides = ["model_config.exe_mode=eager", "model_config.dtype=bfloat16"]
    if RunConfig.load(path, overrides).model.platform_version == "auto":
        overrides.append("model_config.platform_version=a3")  # shapes do not depend on the product
    kind, plan = plan_run(RunConfig.load(path, overrides))
    return plan, kind.build_model(plan.blueprint)


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        num_blocks: blocks of the cache, of which the sequences own some, in no particular order.
    """

    name: str
    batch: Batch
    num_blocks: int

    @property
    def tokens(self) -> int:
        return self.batch.num_tokens


@dataclass(frozen=True)
class Rank:
    recipe: str
    plan: Plan
    model: CausalLM

    @classmethod
    def of(cls, recipe: str) -> "Rank":
        return cls(recipe, *plan_of(recipe))

    @property
    def dense(self) -> MLP | None:
        return next((layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MLP)), None)

    @property
    def sparse(self) -> MoeBlock | None:
        return next((layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoeBlock)), None)

    def steps(self) -> list[Step]:
        """A prefill step with a whole prompt, a running answer and a later chunk of a prompt that crosses a block; a
        decode step of as many rows as the recipe has; and, if sequences may be that long, both beyond the 2048 tokens
        that the compressed mask spans."""
        rows = list(itertools.islice(itertools.cycle((299, 0, 128, 16)), self.plan.batch_size))
        steps = [
            self._step("prefill", "prefill", [(0, 70), (299, 1), (127, 61)]),
            self._step("decode", "decode", [(start, 1) for start in rows]),
        ]
        if self.plan.max_seq_len > 2100:
            steps.append(self._step("long prefill", "prefill", [(2040, 40), (2099, 1)]))
            steps.append(self._step("long decode", "decode", [(2099, 1)]))
        return steps

    def _step(self, name: str, phase: Phase, sequences: list[tuple[int, int]]) -> Step:
        """``sequences``: the position of the first new token of each, and how many there are."""
        size = self.plan.block_size
        needed = [-(-(start + new) // size) for start, new in sequences]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(0)).tolist()
        spans = []
        for (start, new), count in zip(sequences, needed):
            spans.append(Span([0] * new, start, [order.pop() for _ in range(count)]))
        mask = causal_mask("cpu") if phase == "prefill" else None
        batch = build_batch(phase, spans, block_size=size, max_blocks=max(needed), causal_mask=mask)
        return Step(name, batch, sum(needed) + 2)
