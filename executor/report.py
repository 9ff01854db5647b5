# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself: a table on screen and the same as JSON, and the plan as a table."""

import dataclasses
import json
import math
import os
import platform
import resource
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from executor.batch import PHASES
from executor.decisions import shape
from executor.engine import Tally
from executor.generation import Answer
from executor.model_runner import ModelRunner
from executor.plan import Plan
from executor.platform.features import GIB
from executor.prompts import Prompt
from executor.weights import LoadReport


def records(prompts: list[Prompt], answers: list[Answer]) -> list[dict[str, Any]]:
    """Per answer: what was asked and said, and when (seconds since generation started)."""
    return [
        {
            "prompt": p.text or list(p.messages or ()),
            "stop_reason": a.stop_reason,
            "text": a.text,
            "ids": a.output,
            "started": a.started,
            "token_times": a.token_times,
        }
        for p, a in zip(prompts, answers)
    ]


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile of a non-empty list."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _milliseconds(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    mean = sum(seconds) / len(seconds)
    return {
        "mean_ms": 1e3 * mean,
        "p50_ms": 1e3 * percentile(seconds, 0.5),
        "p99_ms": 1e3 * percentile(seconds, 0.99),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory in use so far: of the device on an NPU, resident memory of this process on a CPU."""
    if device.type == "npu":
        return int(torch.npu.max_memory_allocated())  # type: ignore[attr-defined]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summarize(plan: Plan, runner: ModelRunner, load: LoadReport, answers: list[Answer], tally: Tally) -> dict[str, Any]:
    """The figures of a run.

    TTFT counts from the call of ``generate`` and so includes queueing, which is also given alone. TPOT is the time
    between two tokens of one answer, over all such pairs, so p99 shows a stall that a per-answer mean would hide.
    """
    gaps = [b - a for answer in answers for a, b in zip(answer.token_times, answer.token_times[1:])]
    output_tokens = sum(len(answer.output) for answer in answers)
    return {
        "model": plan.run.model.model_name,
        "model_path": str(plan.run.model.config_dir),
        "shape": shape(plan.config),
        "device": plan.features.name,
        "torch": torch.__version__,
        "host": platform.machine(),
        "threads": torch.get_num_threads(),
        "ranks": plan.run.parallel.world_size,
        "groups": {name: size for name, size in plan.blueprint.groups.sizes().items() if size > 1},
        "tokens": {phase: "sharded" if phase in plan.blueprint.sharded else "replicated" for phase in PHASES},
        "moe_strategies": dict(plan.blueprint.moe_strategies),
        "mode": plan.run.model.exe_mode,
        "graphs": dataclasses.asdict(runner.graphs.tally) if runner.graphs else None,
        "dtype": str(plan.blueprint.storage.dtype).removeprefix("torch."),
        "requests": len(answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "output_tokens": output_tokens,
        "stop_reasons": dict(Counter(answer.stop_reason for answer in answers)),
        "queue": _milliseconds([answer.started for answer in answers]),
        "ttft": _milliseconds([answer.ttft for answer in answers]),
        "tpot": _milliseconds(gaps),
        "output_tokens_per_second": output_tokens / tally.seconds if tally.seconds else 0.0,
        "prefill_steps": tally.prefill_steps,
        "prefill_seconds": tally.prefill_seconds,
        "decode_steps": tally.decode_steps,
        "decode_seconds": tally.decode_seconds,
        "agreements": tally.agreements,
        "agreement_seconds": tally.agreement_seconds,
        "load_seconds": load.seconds,
        "load_bytes": load.bytes_read,
        "load_bytes_of_ranks": load.bytes_of_ranks or [load.bytes_read],
        "warm_up_seconds": load.warm_up_seconds,
        "peak_memory_bytes": peak_memory_bytes(runner.device),
        "planned_memory_bytes": plan.memory.total,
    }


def _range(sizes: list[int]) -> str:
    """GiB that a rank read, or the least and the most that one did."""
    least, most = (f"{size / GIB:.3f}" for size in (min(sizes), max(sizes)))
    return least if least == most else f"{least} to {most}"


def _graphs(graphs: dict[str, Any] | None) -> str:
    if graphs is None:
        return "-"
    steps = ", ".join(f"{graphs['steps'].get(rows, 0)} steps of {rows} rows" for rows in graphs["buckets"])
    causes = "".join(f"\n{cause}" for cause in graphs["recompiles"])
    return f"{graphs['traced']} compiled; {steps}; {len(graphs['recompiles'])} recompiled{causes}"


def print_summary(console: Console, figures: dict[str, Any]) -> None:
    def times(value: dict[str, float] | None) -> str:
        if value is None:
            return "-"
        return f"mean {value['mean_ms']:.1f}  p50 {value['p50_ms']:.1f}  p99 {value['p99_ms']:.1f} ms"

    table = Table("figure", "value", title=f"{figures['model']} on {figures['device']}")
    rows = {
        "model": f"{figures['shape']} ({figures['model_path']})",
        "mode, dtype": f"{figures['mode']}, {figures['dtype']}, {figures['threads']} threads",
        "decode graphs": _graphs(figures["graphs"]),
        "layout": f"{figures['ranks']} ranks: " + ", ".join(f"{name} {n}" for name, n in figures["groups"].items()),
        "tokens between layers": ", ".join(f"{how} in {phase}" for phase, how in figures["tokens"].items()),
        "MoE strategy": ", ".join(f"{name} in {phase}" for phase, name in figures["moe_strategies"].items()),
        "requests": f"{figures['requests']}",
        "tokens": f"{figures['prompt_tokens']} prompt, {figures['output_tokens']} output",
        "stopped by": ", ".join(f"{reason} {count}" for reason, count in figures["stop_reasons"].items()),
        "TTFT": times(figures["ttft"]),
        "  of it queue": times(figures["queue"]),
        "TPOT": times(figures["tpot"]),
        "output tokens/s": f"{figures['output_tokens_per_second']:.1f}",
        "steps": f"{figures['prefill_steps']} prefill ({figures['prefill_seconds']:.2f} s), "
        f"{figures['decode_steps']} decode ({figures['decode_seconds']:.2f} s)",
        "agreed on": f"{figures['agreements']} steps between attention groups ({figures['agreement_seconds']:.2f} s)",
        "load": f"{_range(figures['load_bytes_of_ranks'])} GiB in {figures['load_seconds']:.2f} s, "
        f"warm-up {figures['warm_up_seconds']:.2f} s",
        "memory": f"process peak {figures['peak_memory_bytes'] / GIB:.2f} GiB with Python and torch, "
        f"planned {figures['planned_memory_bytes'] / GIB:.2f} GiB",
    }
    without_meaning = {
        "decode graphs": figures["graphs"] is None,
        "layout": figures["ranks"] == 1,
        "tokens between layers": figures["ranks"] == 1,
        "MoE strategy": not figures["moe_strategies"],
        "agreed on": not figures["agreements"],
    }
    for name, value in rows.items():
        if not without_meaning.get(name):
            table.add_row(name, value)
    console.print(table)


def print_plan(console: Console, plan: Plan) -> None:
    table = Table(title=f"plan of {plan.run.model.model_name}")
    for name in ("decision", "value", "reason"):
        table.add_column(name, overflow="fold")  # a narrow terminal must not cut a reason short
    for decision in plan.decisions:
        table.add_row(decision.what, decision.value, decision.reason)
    console.print(table)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` so that ``path`` holds either all of it or what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are readable by their owner only
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
