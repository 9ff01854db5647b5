# SPDX-License-Identifier: Apache-2.0
"""One command, several ranks: what they print, and how they end when one of them does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor.errors import UserError
from executor.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
LONG = ("sampling_config.ignore_eos=true", "scheduler_config.max_new_tokens=900")


def start(recipe, folder, *overrides):
    options = [word for pair in (f"output_config.dir={folder}", *overrides) for word in ("--set", pair)]
    command = [sys.executable, "-m", "executor", "infer", str(ROOT / f"configs/{recipe}.yaml"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, start_new_session=True, **pipes)


def ranks_of(parent: int) -> dict[int, int]:
    """RANK -> process id of the children of ``parent``."""
    found = {}
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        variables = dict(v.split("=", 1) for v in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in v)
        if "RANK" in variables:
            found[int(variables["RANK"])] = int(child)
    return found


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("recipe", ["qwen3_moe_tiny_tp4", "qwen3_moe_tiny_ep4"])
def test_four_ranks_print_what_one_prints(recipe, tmp_path):
    """Two jobs at once on one host, one of them a single rank: both finish, and say the same."""
    jobs = [start(name, tmp_path / name) for name in (recipe, "qwen3_moe_tiny")]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    answers = [out.split("qwen3_moe_tiny on cpu")[0].strip() for out, _ in outputs]
    assert answers[0] == answers[1]
    assert answers[0].count(">") == 4
    logs = sorted(path.name for path in (tmp_path / recipe).rglob("rank*.log"))
    assert logs == ["rank1.log", "rank2.log", "rank3.log"]


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    job = start("qwen3_moe_tiny_tp4", tmp_path, *LONG)
    try:
        wait_for(lambda: len(ranks_of(job.pid)) == 4)
        children = ranks_of(job.pid)
        job.stdout.readline()  # the first prompt is announced: all ranks are loaded and at work
        os.kill(children[2], signal.SIGKILL)
        started = time.monotonic()
        _, err = job.communicate(timeout=30)
        assert time.monotonic() - started < 30
        assert job.returncode == 2
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "error: rank 2 was ended by SIGKILL; the other ranks were ended" in errors[-1]
        assert not any(alive(pid) for pid in children.values())
    finally:
        job.kill()


def test_ctrl_c_leaves_no_rank(tmp_path):
    job = start("qwen3_moe_tiny_tp4", tmp_path, *LONG)
    try:
        wait_for(lambda: len(ranks_of(job.pid)) == 4)
        children = ranks_of(job.pid)
        job.stdout.readline()
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does
        job.communicate(timeout=30)
        assert job.returncode == 130
        assert not any(alive(pid) for pid in children.values())
        assert not list(tmp_path.rglob("report.json"))
    finally:
        job.kill()


def test_the_reason_of_a_rank_that_gives_up_is_passed_on(tmp_path):
    code = "import os, sys, time; r = os.environ['RANK']; print('error: no such shard') if r == '1' else time.sleep(60)"
    started = time.monotonic()
    with pytest.raises(UserError, match=r"^rank 1 failed with exit code 3: no such shard; .*rank1\.log$"):
        run_ranks(3, [sys.executable, "-c", code + "; sys.exit(3)"], tmp_path)
    assert time.monotonic() - started < 20


def test_the_code_of_rank_zero_is_passed_on_without_a_second_message(tmp_path):
    code = "import os, sys, time; r = os.environ['RANK']; time.sleep(60 * int(r)); sys.exit(2)"
    assert run_ranks(3, [sys.executable, "-c", code], tmp_path) == 2
