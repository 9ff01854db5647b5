# SPDX-License-Identifier: Apache-2.0
"""The tests for a card, checked without one: they make the models' calls, can pass, and wrong kernels fail them."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.kv_cache import LayerCache
from executor.platform import npu
from tests.npu import card
from tests.npu.case import Case, Normal
from tests.npu.cases import rank_cases
from tests.npu.compare import equal, rounded
from tests.npu.recipes import Rank
from tests.npu.test_memory import changes
from tests.npu.test_operators import compare
from tests.npu.test_tiny_checkpoints import complaints, runs_on

ROOT = Path(__file__).resolve().parents[1]
ON_ONE_CARD = ("qwen3_dense_8b_a2_tp1", "qwen3_dense_tiny", "qwen3_moe_tiny")


def pytest_of_npu(*options: str, device: str | None, code: str = "") -> subprocess.CompletedProcess:
    """pytest on tests/npu in a process of its own, in which ``code`` runs first."""
    script = f"import sys, pytest\n{code}\nsys.exit(pytest.main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if name != card.VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1"} | ({card.VARIABLE: device} if device else {})
    command = [sys.executable, "-c", script, "tests/npu", "-rs", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


Change = Callable[[torch.Tensor], torch.Tensor]


def element(x: torch.Tensor) -> torch.Tensor:
    """The largest element is off by a tenth; an integer is one less."""
    x = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        flat, largest = x.view(-1), int(x.abs().nan_to_num().argmax())  # NaN: rows that are undefined
        flat[largest] += flat[largest] / 10 if x.is_floating_point() else -1
    return x


def scale(x: torch.Tensor) -> torch.Tensor:
    """All floats are off by a hundredth."""
    return x * 1.01 if x.is_floating_point() else x


WRITTEN = ("key", "value", "updates")  # what operators that write into their arguments call the new contents


class Wrong(TorchDispatchMode):
    """Computes as before, but ``change`` is done to the outputs of operator ``name``; if it writes into its arguments,
    to what it writes."""

    def __init__(self, name: str, change: Change) -> None:
        super().__init__()
        self.name = name
        self.change = change

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() != f"npu::{self.name}":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            written = [argument.name in WRITTEN for argument in func._schema.arguments]
            return func(*(self.change(x) if yes else x for x, yes in zip(args, written)), **kwargs)
        outputs = func(*args, **kwargs)
        single = isinstance(outputs, torch.Tensor)
        return self.change(outputs) if single else type(outputs)(map(self.change, outputs))


class Recorder(TorchDispatchMode):
    """Collects the calls of vendor operators with all that they depend on: shapes, strides, numbers, names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "npu":
            self.calls.add(f"{func.name()} {self._described(args)} {self._described(sorted(kwargs.items()))}")
        return func(*args, **kwargs)

    def _described(self, x):
        if isinstance(x, torch.Tensor):
            return f"{x.dtype} {tuple(x.shape)} {x.stride()}"
        return [self._described(item) for item in x] if isinstance(x, list | tuple) else x


def wrong_device(operator: str, change: Change) -> card.Device:
    return dataclasses.replace(card.CPU, around=partial(Wrong, operator, change))


def on_meta(value):
    if isinstance(value, Normal):
        return torch.empty(value.shape, dtype=torch.bfloat16, device="meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("recipe", ON_ONE_CARD)
@torch.inference_mode()
def test_cases_call_the_operators_as_the_models_do(recipe):
    """Every call of a forward pass, planned for a card and run on the meta device, is that of a case, to the stride."""
    rank = Rank.of(recipe)
    attention = rank.model.layers[0].self_attn
    for step in rank.steps()[:2]:
        fields = {field.name: getattr(step.batch, field.name) for field in dataclasses.fields(step.batch)}
        batch = type(step.batch)(**{name: on_meta(value) for name, value in fields.items()})
        cache = Normal((step.num_blocks, rank.plan.block_size, attention.num_kv_heads, attention.head_dim))
        with Recorder() as model:
            rank.model(batch, [LayerCache(on_meta(cache), on_meta(cache))] * len(rank.model.layers))
        with Recorder() as cases:
            for case in rank_cases(rank):
                if case.step == step.name:
                    case.call(*map(on_meta, case.given))
        assert model.calls
        assert sorted(model.calls - cases.calls) == []


@cache
def one_case_of_each() -> dict[str, Case]:
    """By what they are called. Of the prefill step: in a decode step of few tokens a wrong row may go nowhere."""
    ranks = map(Rank.of, ("qwen3_dense_tiny", "qwen3_moe_tiny", "qwen3_moe_tiny_sp4"))
    return {c.operator: c for rank in ranks for c in rank_cases(rank) if c.step == "prefill"}


@torch.inference_mode()
def operators_of(case: Case) -> list[str]:
    with Recorder() as recorder:
        case.call(*map(on_meta, case.given))
    return [call.split(" ")[0].removeprefix("npu::") for call in recorder.calls]


@pytest.mark.parametrize("change", [element, scale, torch.zeros_like])
@torch.inference_mode()
def test_a_wrong_operator_is_noticed(change):
    """Each operator of each case in turn; with the right one the same case passes."""
    unnoticed = []
    for name, case in one_case_of_each().items():
        assert not any(finding.complaint for finding in compare(case, card.CPU)), name
        for operator in operators_of(case):
            if not any(finding.complaint for finding in compare(case, wrong_device(operator, change))):
                unnoticed.append((name, operator))
    if change is scale:  # renormalised weights forget a common factor
        unnoticed = [(name, operator) for name, operator in unnoticed if not name.startswith("gate_topk_unfused")]
    assert unnoticed == []


# operators that executor/ops calls and that have no case, and why
WITHOUT_CASE = {
    "npu_moe_distribute_dispatch_v2": "needs several cards",
    "npu_moe_distribute_combine_v2": "needs several cards",
    "npu_moe_distribute_combine_add_rms_norm": "needs several cards",
    "npu_moe_init_routing": "the column family, which no model uses",
    "npu_moe_compute_expert_tokens": "the column family, which no model uses",
}


def test_every_operator_that_we_call_has_a_case():
    """Or stands above with a reason."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "executor/ops").glob("*.py"))
    called = set(re.findall(r"torch\.ops\.npu\.(\w+)\(", text))
    covered = {operator for case in one_case_of_each().values() for operator in operators_of(case)}
    assert covered - called == {"npu_fused_infer_attention_score"}  # beside its second version, which models call
    assert called - covered == WITHOUT_CASE.keys()


@pytest.mark.parametrize(
    ("rule", "change", "complaint"),
    [
        (equal, lambda x: x, ""),
        (equal, lambda x: x.clone().index_fill_(0, torch.tensor([5]), 7), "1 of 64 elements differ, the first at (5,)"),
        (equal, lambda x: x.float(), "it is torch.float32 (64,) on the card, torch.bfloat16 (64,) on the CPU"),
        (equal, lambda x: x[:63], "it is torch.bfloat16 (63,) on the card"),
        (rounded, lambda x: x, ""),
        (rounded, lambda x: x * 1.01, "its error is typically"),
        (rounded, lambda x: x.clone().index_fill_(0, torch.tensor([5]), 7), "worst at (5,): card 7, CPU"),
        (rounded, lambda x: x.clone().index_fill_(0, torch.tensor([5]), torch.nan), "1 of 64 elements are NaN"),
        (rounded, lambda x: x.double(), "it is torch.float64 (64,)"),
    ],
)
def test_rules_of_comparison(rule, change, complaint):
    exact = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = exact.bfloat16()
    found = rule(change(reference), reference, exact).complaint
    assert complaint in found
    assert bool(complaint) == bool(found)


def test_one_more_rounding_of_an_intermediate_is_allowed():
    """What a card may do to probabilities before the product with V; three times as much is not."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(64, 300, dtype=torch.float64, generator=generator).softmax(-1)
    v = torch.randn(300, 128, generator=generator).bfloat16().double()
    exact = p @ v
    reference = exact.bfloat16()
    once = rounded((p.bfloat16().double() @ v).bfloat16(), reference, exact)
    assert once.complaint == ""
    assert once.typical > 1.1  # it does cost something
    coarse = p * (1 + 2**-6 * (torch.rand(p.shape, dtype=torch.float64, generator=generator) - 0.5))
    assert rounded((coarse @ v).bfloat16(), reference, exact).complaint


def test_a_wrong_operator_is_noticed_in_the_logits():
    """Off by a tenth: small beside a bug, and what a layer makes of it is small beside the residual."""
    runs = runs_on("moe", card.CPU)
    assert complaints(runs) == []
    for operator in ("npu_swiglu", "npu_moe_finalize_routing", "npu_fused_infer_attention_score_v2"):
        runs.device.device = wrong_device(operator, lambda x: x * 1.1)
        assert complaints(runs), operator


def test_a_wrong_prediction_of_memory_is_noticed():
    for change in changes("qwen3_dense_tiny", card.CPU):
        assert change.is_as_planned
        assert change.margin < change.planned
        assert not dataclasses.replace(change, planned=change.planned - change.margin - 1).is_as_planned
        assert not dataclasses.replace(change, planned=change.planned + change.margin + 1).is_as_planned


def test_they_pass_where_the_cpu_stands_in_for_the_card():
    done = pytest_of_npu("-k", "tiny", device="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^paged_attention +1\.00 ", done.stdout, re.MULTILINE)  # the table of errors for a report
    assert "skipped" not in done.stdout


def test_a_wrong_operator_fails_the_run():
    code = "from tests.npu import card; from tests.test_npu_smoke_selfcheck import scale, wrong_device; "
    code += "card.find = lambda: wrong_device('npu_rms_norm', scale)"
    done = pytest_of_npu("-k", "qwen3_dense_tiny-rms_norm", device=None, code=code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rms_norm is wrong on cpu, qwen3_dense_tiny, prefill" in done.stdout


def test_without_a_card_there_is_one_reason_for_all():
    if npu.detect():
        pytest.skip("this machine has a card")
    done = pytest_of_npu(device=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", done.stdout, re.MULTILINE) == [card.NO_CARD]


def test_a_card_that_was_asked_for_has_to_be_there(monkeypatch):
    if npu.detect():
        pytest.skip("this machine has a card")
    monkeypatch.setenv(card.VARIABLE, "npu")
    with pytest.raises(RuntimeError, match="NPU_SMOKE_DEVICE=npu, but no Ascend card"):
        card.find()
    monkeypatch.setenv(card.VARIABLE, "gpu")
    with pytest.raises(RuntimeError, match="NPU_SMOKE_DEVICE=gpu: use npu or cpu"):
        card.find()


def test_the_page_and_the_job_name_what_there_is():
    page = (ROOT / "docs/on_a_card.md").read_text(encoding="utf-8")
    job = (ROOT / ".github/workflows/npu.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:tests|scripts|docs|\.github)/[\w/.]+\.(?:py|sh|md|yml)", page + job))
    assert {path for path in named if not (ROOT / path).exists()} == set()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests/npu").glob("test_*.py")} <= named
    assert "scripts/test_npu.sh" in job
    doubtful = re.findall(r"^\| `([^`]+)`", page.partition("## If something fails")[2], re.MULTILINE)
    assert len(doubtful) == 8
    assert {name for name in doubtful if not any(case.startswith(name) for case in one_case_of_each())} == set()
