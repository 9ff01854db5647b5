# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of ``assets/`` through the whole runner on the device, beside the same runner on the CPU.

The CPU in float32 says what is right, the CPU in bfloat16 what rounding costs. Questions are those of
``assets/heldout.jsonl``, which no training has seen, and the answers are greedy.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from rich.console import Console
from torch import Tensor

from executor.batch import Batch, Span, build_batch, dead_span
from executor.config import RunConfig
from executor.evaluation import final_answer, score
from executor.generation import Answer
from executor.prompts import read_prompts
from executor.session import Session
from tests.npu.card import CPU, Device
from tests.npu.compare import TYPICAL
from tests.npu.recipes import ROOT

QUESTIONS = read_prompts(ROOT / "assets/heldout.jsonl")[:50]
ROWS = 8  # decoded together
# Experts are chosen by comparing logits, so rounding sends a token to another expert now and then, whose row is then
# off by much more than rounding. Rows are therefore compared by the median and by what nine in ten do not exceed.
TENTH = 0.9
UNEVEN = 3.0  # the latter varies more than the median; with it, of what the CPU has


@dataclass
class Run:
    """One checkpoint on one device in one dtype."""

    session: Session
    device: Device

    @classmethod
    def of(cls, kind: str, device: Device, dtype: str) -> "Run":
        overrides = [
            f"model_config.platform_version={device.platform}",
            f"model_config.dtype={dtype}",
            f"scheduler_config.batch_size={ROWS}",
            "scheduler_config.block_size=128",  # the one that every document of the attention operator allows
        ]
        return cls(Session.open(RunConfig.load(ROOT / f"configs/qwen3_{kind}_tiny.yaml", overrides)), device)

    @cached_property
    def runner(self):
        return self.session.load(Console(quiet=True))[0]

    @cached_property
    def answers(self) -> list[Answer]:
        with self.device.around():
            return self.session.answer(self.runner, self.session.requests(QUESTIONS), lambda *said: None)[0]

    def logits(self, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Tensor]:
        """float32 logits with the tokens of ``outputs`` given: of every row of the prompts' prefill step, of the last
        row of each prompt, and of the decode steps."""
        found: dict[str, list[Tensor]] = {"prompt": [], "first step": [], "decode": []}
        for start in range(0, len(prompts), ROWS):
            self._logits(prompts[start : start + ROWS], outputs[start : start + ROWS], found)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _logits(self, prompts: list[list[int]], outputs: list[list[int]], found: dict[str, list[Tensor]]) -> None:
        size = self.runner.plan.block_size
        spans = [Span(prompt, 0, [1 + i]) for i, prompt in enumerate(prompts)]  # one block is enough for each
        batch = self._batch("prefill", spans)
        rows = self._step(dataclasses.replace(batch, logit_rows=torch.arange(batch.num_tokens)))
        found["prompt"].append(rows)
        found["first step"].append(rows[batch.logit_rows])
        for n in range(max(map(len, outputs)) - 1):
            spans = [dead_span(row, size) for row in range(ROWS)]
            live = [i for i, output in enumerate(outputs) if n < len(output) - 1]
            for i in live:
                spans[i] = Span([outputs[i][n]], len(prompts[i]) + n, [1 + i])
            found["decode"].append(self._step(self._batch("decode", spans))[live])

    def _batch(self, phase, spans: list[Span]) -> Batch:
        plan, mask = self.runner.plan, self.runner.causal_mask if phase == "prefill" else None
        return build_batch(phase, spans, block_size=plan.block_size, max_blocks=plan.max_blocks, causal_mask=mask)

    def _step(self, batch: Batch) -> Tensor:
        with self.device.around():
            return self.runner.step(batch).cpu().float()


@dataclass
class Runs:
    exact: Run
    rounded: Run
    device: Run

    def logits(self, run: Run) -> dict[str, Tensor]:
        """Along the answers that float32 gives, so that all three runs see the same tokens."""
        prompts = [request.prompt for request in run.session.requests(QUESTIONS)]
        return run.logits(prompts, [answer.output for answer in self.exact.answers])

    @cached_property
    def exact_logits(self) -> dict[str, Tensor]:
        return self.logits(self.exact)

    @cached_property
    def rounded_logits(self) -> dict[str, Tensor]:
        return self.logits(self.rounded)

    def errors(self, logits: dict[str, Tensor]) -> dict[str, Tensor]:
        """Per row of logits, the root mean square distance from float32."""
        return {name: (x - self.exact_logits[name]).square().mean(-1).sqrt() for name, x in logits.items()}


def runs_on(kind: str, device: Device) -> Runs:
    runs = Runs(Run.of(kind, CPU, "float32"), Run.of(kind, CPU, "bfloat16"), Run.of(kind, device, "bfloat16"))
    for run in (runs.exact, runs.rounded, runs.device):
        _ = run.runner  # now: each chooses its platform's rounding points, and a test then those of the device
    return runs


@pytest.fixture(scope="module", params=["dense", "moe"])
def runs(request, device):
    return runs_on(request.param, device)


def complaints(runs: Runs) -> list[str]:
    """Groups of rows in which the device is further from float32 than rounding explains."""
    found = []
    of_rounding = runs.errors(runs.rounded_logits)
    for name, error in runs.errors(runs.logits(runs.device)).items():
        for quantile, limit in ((0.5, TYPICAL), (TENTH, UNEVEN)):
            mine, cpu = error.quantile(quantile).item(), of_rounding[name].quantile(quantile).item()
            if not mine <= limit * cpu:  # also if it is NaN
                what = f"{name}: {quantile:.0%} of the rows are off by at most"
                found.append(f"{what} {mine:.4f}; on the CPU {cpu:.4f}, of which {limit:g} times is right")
    return found


def test_logits_are_as_close_to_float32_as_the_cpu_in_bfloat16(runs):
    assert complaints(runs) == []


def test_greedy_answers_are_those_of_float32(runs):
    """Equal without tolerance: the best token leads by twenty times what rounding moves a logit. Checked first."""
    steps = ("first step", "decode")
    leads = torch.cat([runs.exact_logits[name] for name in steps]).topk(2).values.diff().neg()
    moved = torch.cat([runs.rounded_logits[name] - runs.exact_logits[name] for name in steps])
    assert leads.min() > 8 * moved.abs().max()
    assert [a.output for a in runs.device.answers] == [a.output for a in runs.exact.answers]
    assert {a.stop_reason for a in runs.device.answers} == {"eos"}


def test_share_of_exact_answers_is_that_of_the_cpu(runs, record_property):
    expected = [question.answer for question in QUESTIONS]
    device, cpu = (score(expected, [final_answer(a.text) for a in r.answers]) for r in (runs.device, runs.rounded))
    assert device == cpu
    assert device.share > 0.9  # both checkpoints answer 99.8 % of all held-out questions
