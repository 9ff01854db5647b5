# SPDX-License-Identifier: Apache-2.0
"""One command, several ranks, on one machine or two: what they print, and how they end when one of them does.

The command is real, and so are the signals. A second machine is a second launcher on this one, which it cannot tell.
Which phase a rank is in is read from what it has printed, and checked again by what it did not print any more.
"""

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from executor import launch
from executor.errors import UserError
from executor.launch import run_ranks
from executor.parallel import world
from executor.parallel.machines import Machine, this_machine
from executor.platform import npu

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "assets/qwen3_moe_tiny"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "GLOO_SOCKET_IFNAME": "lo"}
LONG = ("sampling_config.ignore_eos=true", "scheduler_config.max_new_tokens=900", "data_config.dataset=null")
PAIR = [f"parallel_config.{name}_size=2" for name in ("world", "attn_tp", "moe_tp", "embed_tp", "lmhead_tp")]
ELSEWHERE = "240.0.0.1"  # reserved for ever (RFC 1112), so no machine's own
END_SECONDS = 30  # from a failure to the end of the command; a busy machine needs some of it


class Job:
    """A command that was started, as a terminal starts it: in a process group of its own."""

    def __init__(self, recipe, folder, *overrides, prompt=None, launcher=(), **variables):
        words = [word for pair in (f"output_config.dir={folder}", *overrides) for word in ("--set", pair)]
        words += ["--prompt", prompt] if prompt else []
        recipe = ROOT / f"configs/{recipe}.yaml"
        command = [sys.executable, *launcher, "-m", "executor", "infer", str(recipe), *words]
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            env={**ENVIRONMENT, **variables},
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self, size):
        """RANK -> process id, once all of them are there; also while they still are copies of their parent."""
        found = {}
        parent = self.process.pid
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            try:
                variables = Path(f"/proc/{child}/environ").read_text().split("\0")
            except OSError:
                continue
            found.update({int(v.removeprefix("RANK=")): int(child) for v in variables if v.startswith("RANK=")})
        return found if len(found) == size else {}

    def log(self, rank):
        found = list(self.folder.rglob(f"rank{rank}.log"))
        return found[0].read_text() if found else ""

    def end(self):
        """(exit code, what was printed, the messages but for the first, that ranks start), within ``END_SECONDS`` of
        now."""
        out, err = self.process.communicate(timeout=END_SECONDS)
        start, *messages = err.splitlines()
        assert re.match(r"starting ranks? [\d to]+ of \d, logs in /", start)
        return self.process.returncode, out, messages


@contextmanager
def jobs():
    """Starts jobs, and ends what is left of them, whatever the test did."""
    started = []

    def start(*arguments, **options):
        started.append(Job(*arguments, **options))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.process.kill()
            job.process.communicate()


def until(condition, seconds=120.0):
    """What ``condition`` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def two_machines():
    """Variables of the two launchers of one run."""
    shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{**shared, "NODE_RANK": str(rank)} for rank in range(2)]


# ---- runs that end well ----


def test_jobs_at_once_print_what_one_rank_prints(tmp_path):
    """Three jobs at once on this host, with one folder for their results: four ranks on two machines, two ranks on one,
    and one alone. The second machine is on this host, so its launcher counts as a job."""
    first, second = two_machines()
    with jobs() as start:
        running = [
            start("qwen3_moe_tiny_tp4", tmp_path, **first),
            start("qwen3_moe_tiny_tp4", tmp_path, **second),
            start("qwen3_moe_tiny_tp4", tmp_path, *PAIR),
            start("qwen3_moe_tiny", tmp_path),
        ]
        outputs = [job.process.communicate(timeout=240) for job in running]
        assert [job.process.returncode for job in running] == [0, 0, 0, 0], outputs
    two, silent, one, alone = (out.split("qwen3_moe_tiny on cpu")[0].strip() for out, _ in outputs)
    assert two == one == alone
    assert alone.count(">") == 4
    assert silent == ""
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"qwen3_moe_tiny", *(f"qwen3_moe_tiny_tp4{end}" for end in ("", "-2", "-3"))}
    logs = [sorted(path.name for path in folder.glob("logs/*")) for folder in tmp_path.iterdir()]
    assert sorted(logs) == [[], ["rank1.log"], ["rank1.log"], ["rank2.log", "rank3.log"]]
    reports = [json.loads(Path(re.search(r"report: (.+)", outputs[n][0])[1]).read_text()) for n in (0, 2, 3)]
    assert [report["figures"]["ranks"] for report in reports] == [4, 2, 1]
    assert [report["figures"]["groups"].get("moe_tp") for report in reports] == [4, 2, None]


def test_under_torchrun_one_rank_speaks(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    with jobs() as start:
        job = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, "model_config.force_eplb=true", launcher=torchrun)
        out, err = job.process.communicate(timeout=120)
    assert job.process.returncode == 0, err
    assert [out.count("> "), out.count("qwen3_moe_tiny on cpu"), err.count("note: ")] == [4, 1, 1]


# ---- a rank that dies or hangs ----


def slow_to_load(folder):
    """The tiny model with wider experts. Its file of 800 MB is all holes: zeros, which nobody gets to compute with."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["moe_intermediate_size"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    end = 0
    for name, entry in header.items():
        if ".experts." in name:
            entry["shape"] = [128, 16384] if name.endswith("down_proj.weight") else [16384, 128]
        size = {"F32": 4, "BF16": 2}[entry["dtype"]]
        for length in entry["shape"]:
            size *= length
        entry["data_offsets"], end = [end, end + size], end + size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def start_loading(start, folder):
    job = start(
        "qwen3_moe_tiny_tp4", folder, f"model_config.model_path={slow_to_load(folder / 'model')}", *LONG, prompt="1+1"
    )
    until(lambda: "loading: 10 %" in job.log(2))
    return job, lambda out: out == "" and "100 %" not in job.log(2)


def start_prefill(start, folder):
    wide = ("scheduler_config.max_prefill_tokens=64", "model_config.max_position_embeddings=8192")
    job = start("qwen3_moe_tiny_tp4", folder, *wide, *LONG, prompt="1+" * 3000)
    assert job.process.stdout.readline().startswith("> 1+1+")  # printed once all ranks are loaded
    return job, lambda out: out == ""


def reach_decode(job):
    assert job.process.stdout.readline() == "> 1+1\n"
    assert job.process.stdout.read(1)  # of the answer


@pytest.mark.parametrize("phase", [start_loading, start_prefill])
def test_a_killed_rank_ends_the_run_and_is_named(phase, tmp_path):
    with jobs() as start:
        job, interrupted = phase(start, tmp_path)
        ranks = job.ranks(4)
        os.kill(ranks[2], signal.SIGKILL)
        code, out, errors = job.end()
        assert interrupted(out)
        log = next(tmp_path.rglob("rank2.log"))
        assert errors == [
            f"error: rank 2 was ended by SIGKILL; the other ranks were ended; all that rank 2 printed is in {log}"
        ]
        assert code == 2
        assert not any(map(alive, ranks.values()))


def test_a_stopped_rank_is_named_and_ended(tmp_path):
    """The others wait ``timeout_seconds``, then call the roll. Who they name comes from them, not from the launcher."""
    with jobs() as start:
        job = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, *LONG, "parallel_config.timeout_seconds=8", prompt="1+1")
        reach_decode(job)
        ranks = job.ranks(2)
        os.kill(ranks[1], signal.SIGSTOP)
        code, _, (error,) = job.end()
        assert re.match(r"error: rank 1 did not take part in \w+ of rank 0: Timed out waiting 8000ms", error)
        assert code == world.PEER_LOST
        assert not any(map(alive, ranks.values()))


def test_ctrl_c_leaves_no_rank(tmp_path):
    """The second one comes while the ranks are being ended."""
    with jobs() as start:
        job = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, *LONG, prompt="1+1")
        reach_decode(job)
        ranks = job.ranks(2)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        time.sleep(0.1)
        os.killpg(job.process.pid, signal.SIGINT)
        code, out, messages = job.end()
        assert (code, messages) == (130, ["interrupted"])
        assert out.endswith("\n")
        assert not any(map(alive, ranks.values()))
        assert not list(tmp_path.rglob("report.json"))


def test_a_reader_that_is_gone_ends_the_run_quietly(tmp_path):
    """As ``| head -1`` does."""
    with jobs() as start:
        job = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, *LONG, prompt="1+1")
        reach_decode(job)
        ranks = job.ranks(2)
        job.process.stdout.close()
        assert job.process.wait(END_SECONDS) == 141
        assert len(job.process.stderr.read().splitlines()) == 1
        assert not any(map(alive, ranks.values()))


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    with jobs() as start:
        job = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, *LONG, prompt="1+1")
        job.process.stdout.readline()
        ranks = job.ranks(2)
        job.process.kill()
        until(lambda: not any(map(alive, ranks.values())), END_SECONDS)


# ---- a failure on one of two machines ----


def test_a_rank_killed_in_decode_is_named_on_both_machines(tmp_path):
    first, second = two_machines()
    with jobs() as start:
        here = start("qwen3_moe_tiny_tp4", tmp_path / "0", *LONG, prompt="1+1", **first)
        there = start("qwen3_moe_tiny_tp4", tmp_path / "1", *LONG, prompt="1+1", **second)
        reach_decode(here)
        ranks = {**here.ranks(2), **there.ranks(2)}
        os.kill(ranks[2], signal.SIGKILL)
        ends = [here.end(), there.end()]
        assert [code for code, _, _ in ends] == [2, 2]
        (said_here,), (said_there,) = (errors for _, _, errors in ends)
        assert said_there.startswith("error: rank 2 was ended by SIGKILL; ")
        assert said_here.startswith(f"error: machine 1 ({socket.gethostname()}): rank 2 was ended by SIGKILL; ")
        assert ends[0][1].endswith("\n")  # the answer broke off, the error has a line of its own
        assert not any(map(alive, ranks.values()))
        assert not list(tmp_path.rglob("report.json"))


def test_a_checkpoint_damaged_on_one_machine_is_named_on_both(tmp_path):
    """Rank 1 alone fails to load: the copy of its machine lacks a tensor."""
    damaged = shutil.copytree(TINY, tmp_path / "damaged")
    data = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data.replace(b'"model.norm.weight"', b'"model.norm.weighs"'))
    first, second = two_machines()
    with jobs() as start:
        here = start("qwen3_moe_tiny_tp4", tmp_path / "0", *PAIR, **first)
        there = start("qwen3_moe_tiny_tp4", tmp_path / "1", *PAIR, f"model_config.model_path={damaged}", **second)
        until(lambda: there.process.poll() is not None)
        ends = [here.end(), there.end()]
    assert [code for code, _, _ in ends] == [2, 2]
    for _, _, (error,) in ends:
        assert f"rank 1 failed with exit code 2: {damaged}: 1 tensor missing: model.norm.weight; unexpected: " in error


def test_machines_with_different_prompts_refuse(tmp_path):
    first, second = two_machines()
    with jobs() as start:
        here = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, prompt="1+1", **first)
        there = start("qwen3_moe_tiny_tp4", tmp_path, *PAIR, prompt="1+2", **second)
        until(lambda: here.process.poll() is not None)
        (code, out, (error,)), (other, _, _) = here.end(), there.end()
    assert (code, other, out) == (2, 2, "")
    assert error.startswith("error: prompt 1 differs between rank 0, which has 1, and rank 1, which has 1; give all ")


def test_a_wrong_master_addr_is_one_line(tmp_path):
    """No backtrace of torch's before it."""
    variables = {**two_machines()[0], "MASTER_ADDR": ELSEWHERE}
    with jobs() as start:
        job = start("qwen3_moe_tiny_tp4", tmp_path, "parallel_config.timeout_seconds=2", **variables)
        until(lambda: job.process.poll() is not None)
        code, _, (error,) = job.end()
    assert code == world.PEER_LOST
    assert error.startswith(f"error: MASTER_ADDR={ELSEWHERE}, MASTER_PORT=")


# ---- the launcher and the store, without a model ----


def ranks_that(*lines):
    """A command that runs ``lines`` with its rank as r."""
    return [sys.executable, "-c", "\n".join(("import os, signal, sys, time", "r = int(os.environ['RANK'])", *lines))]


def test_the_reason_of_a_rank_that_gives_up_is_passed_on(tmp_path):
    command = ranks_that("time.sleep(60 * (r != 1))", "print('error: no such shard')", "print('bye')", "sys.exit(3)")
    with pytest.raises(UserError, match=r"^rank 1 failed with exit code 3: no such shard; .*rank1\.log$"):
        run_ranks(3, command, tmp_path)


def test_the_code_of_rank_zero_is_passed_on_without_a_second_message(tmp_path):
    """It wins over one that failed a little earlier, since both mostly say the same."""
    assert run_ranks(3, ranks_that("time.sleep([0.3, 60, 0][r])", "sys.exit(4 - r)"), tmp_path) == 4


@pytest.mark.parametrize(("cause", "reason"), [("os.kill(os.getpid(), 11)", "ended by SIGSEGV"), ("sys.exit(9)", "9")])
def test_a_rank_that_lost_another_is_not_taken_for_the_cause(cause, reason, tmp_path):
    """Ranks 0 and 2 notice before their launcher does that rank 1 is gone."""
    command = ranks_that(f"if r != 1: sys.exit({world.PEER_LOST})", "time.sleep(0.3)", cause)
    with pytest.raises(UserError, match=rf"^rank 1 (was|failed with exit code) {reason}") as caught:
        run_ranks(3, command, tmp_path)
    assert not isinstance(caught.value, world.PeerLost)


def test_who_was_lost_is_passed_on_if_nothing_else_is_known(tmp_path):
    command = ranks_that("time.sleep(60 * (r != 1))", "print('error: rank 2 hangs')", f"sys.exit({world.PEER_LOST})")
    with pytest.raises(
        world.PeerLost, match=r"^rank 2 hangs; the other ranks were ended; all that rank 1 printed is in .*rank1\.log$"
    ):
        run_ranks(3, command, tmp_path)


def test_a_rank_that_does_not_end_is_named(tmp_path):
    with pytest.raises(UserError, match=r"^rank 1 did not end within 1 s of the first"):
        run_ranks(2, ranks_that("time.sleep(60 * r)"), tmp_path, timeout_seconds=1)


def test_a_port_that_is_taken_is_an_error_and_no_rank_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^MASTER_PORT={port} is taken on this machine"):
            run_ranks(2, ranks_that(), tmp_path, machine=Machine(port=port))
    assert not list(tmp_path.rglob("*.log"))


def test_machine_zero_that_never_comes_is_an_error(tmp_path):
    machine = Machine(rank=1, count=2, port=int(free_port()))
    with pytest.raises(world.PeerLost, match=rf"MASTER_PORT={machine.port}: no answer within 1 s"):
        run_ranks(2, ranks_that(), tmp_path, machine=machine, timeout_seconds=1)


def test_a_name_that_machine_zero_cannot_resolve_is_an_error(tmp_path):
    machine = Machine(rank=0, count=2, address="nowhere.invalid", port=int(free_port()))  # RFC 2606: never a name
    with pytest.raises(UserError, match=r"^MASTER_ADDR=nowhere\.invalid, .* of this machine, which has NODE_RANK=0$"):
        run_ranks(2, ranks_that(), tmp_path, machine=machine)


@pytest.mark.parametrize(("machine", "kept"), [(Machine(), []), (Machine(rank=1, count=2), [0, 2])])
def test_logs_of_an_earlier_job_are_removed(machine, kept, tmp_path):
    """But not those of ranks of another machine, which may share the folder."""
    for number in (0, 2, 4, 11):
        (tmp_path / f"rank{number}.log").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    launch._prepare(tmp_path, 4, machine)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", *(f"rank{number}.log" for number in kept)}


def arrivals(monkeypatch, present, size):
    """Let this process be rank 0 of ``size``; the ranks ``present`` arrive at the first two occasions."""
    store = dist.HashStore()
    monkeypatch.setattr(world, "_store", store)
    monkeypatch.setattr(world, "_arrivals", 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    for number in present:
        store.set(f"1 load {number}", "")
    return store


def test_ranks_that_do_not_arrive_are_named(monkeypatch):
    arrivals(monkeypatch, [2], 4)
    with pytest.raises(
        world.PeerLost, match=r"^ranks 1, 3 did not load within parallel_config\.timeout_seconds=0\.2 after"
    ):
        world.arrive("load", 0.2)


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ([1, 4, 5], r"machine 1 \(NODE_RANK=1\)"),
        ([1, 4], r"machine 1 \(NODE_RANK=1\) and rank 5"),
        ([1], r"machine 1 \(NODE_RANK=1\) and machine 2 \(NODE_RANK=2\)"),
        ([3], r"machine 2 \(NODE_RANK=2\) and ranks 1, 2"),
    ],
)
def test_a_machine_of_which_nobody_arrives_is_named(monkeypatch, present, words):
    arrivals(monkeypatch, present, 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(world.PeerLost, match=f"^{words} did not load within"):
        world.arrive("load", 0.2)


def test_a_late_rank_is_waited_for(monkeypatch):
    store = arrivals(monkeypatch, [2], 3)
    threading.Timer(0.3, store.set, ("1 load 1", "")).start()
    world.arrive("load", 60)
    assert store.check(["1 load 1"])


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (
            RuntimeError("[/src/gloo/pair.cc:9] Closed by peer [1.2.3.4]:5. Typically that\nmeans"),
            "Closed by peer [1.2.3.4]:5",
        ),
        (RuntimeError("HCCL function error: HcclAllReduce"), "HCCL function error: HcclAllReduce"),
        (RuntimeError("EI0002: timed out"), "EI0002: timed out (parallel_config.timeout_seconds)"),
        (dist.DistNetworkError("Failed to recv"), "Failed to recv"),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), None),
        (UserError("gloo"), None),
    ],
)
def test_which_errors_are_a_lost_peer(monkeypatch, error, meaning):
    arrivals(monkeypatch, [], 2)
    monkeypatch.setattr(world, "ROLL_CALL_SECONDS", 0)
    lost = world.lost_peer(error)
    assert (lost and str(lost)) == (meaning and f"rank 1 did not take part in a collective of rank 0: {meaning}")


# ---- which machine this is ----


@pytest.mark.parametrize(
    ("hosts", "variables", "machine"),
    [
        ([], {}, Machine()),
        ([], {"MASTER_PORT": "5"}, Machine(port=5)),
        ([], {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": ELSEWHERE}, Machine()),
        (["127.0.0.1", ELSEWHERE], {}, Machine(rank=0, count=2, address="127.0.0.1", port=29500)),
        ([ELSEWHERE, "localhost"], {}, Machine(rank=1, count=2, address=ELSEWHERE, port=29500)),
        ([ELSEWHERE, socket.gethostname()], {}, Machine(rank=1, count=2, address=ELSEWHERE, port=29500)),
        (["a", "b"], {"NODE_RANK": "1"}, Machine(rank=1, count=2, address="a", port=29500)),
        (
            [],
            {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "7"},
            Machine(rank=3, count=4, address="a", port=7),
        ),
    ],
)
def test_this_machine_is_found(hosts, variables, machine):
    assert this_machine(hosts, 8, variables) == machine


@pytest.mark.parametrize(
    ("hosts", "variables", "words"),
    [
        ([], {"NNODES": "two"}, "NNODES=two in the environment: expected an integer from 1 to 65536"),
        ([], {"NNODES": "3"}, "NNODES=3 does not divide parallel_config.world_size=8"),
        ([], {"NODE_RANK": "1"}, "NODE_RANK=1 in the environment: expected an integer from 0 to 0; NNODES is how many"),
        ([], {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 in the environment: expected an integer from 0 to 1"),
        ([], {"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES=2 needs NODE_RANK in the environment"),
        ([], {"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 needs MASTER_ADDR in the environment"),
        ([], {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment: expected an integer from 1 to 65535"),
        (["a", "b"], {"NNODES": "4"}, "NNODES=4, but parallel_config.hosts has 2 entries"),
        ([ELSEWHERE], {}, "no entry is this machine"),
        (["127.0.0.1", "localhost"], {}, "entries [0, 1] are all this machine"),
    ],
)
def test_a_machine_that_cannot_be_told_is_an_error(hosts, variables, words):
    with pytest.raises(UserError) as caught:
        this_machine(hosts, 8, variables)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- settings for HCCL, which no CPU can try ----


@pytest.mark.parametrize(
    ("purpose", "product", "alone", "variables", "expected"),
    [
        (npu.LAYERS, "a2", True, {}, {"hccl_buffer_size": 64, "hccl_op_expansion_mode": npu.AIV}),
        (npu.LAYERS, "a3", True, {}, {"hccl_buffer_size": 64, "hccl_op_expansion_mode": npu.AIV}),
        (npu.LAYERS, "950", True, {}, {"hccl_buffer_size": 64}),
        (npu.LAYERS, "a3", False, {}, {"hccl_buffer_size": 64}),
        (npu.MC2, "a3", True, {}, {"hccl_buffer_size": 64}),
        (npu.LAYERS, "a3", True, {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, {"hccl_buffer_size": 64}),
    ],
)
def test_vector_cores_communicate_where_nothing_waits_for_them(purpose, product, alone, variables, expected):
    assert npu.hccl_config(purpose, product, 64, alone=alone, variables=variables) == expected


def test_what_the_recipe_leaves_out_is_left_to_hccl():
    assert npu.hccl_config(npu.MC2, "a3", None, alone=False, variables={}) == {}


def test_launchers_claim_different_ports_and_give_them_back():
    with ExitStack() as one, ExitStack() as two:
        first, second = npu.claim_ports(one), npu.claim_ports(two)
        assert abs(first - second) >= npu.HCCL_PORTS
    with ExitStack() as again:
        assert npu.claim_ports(again) == first


def test_ports_that_are_in_use_are_passed_over():
    with ExitStack() as held:
        first = npu.claim_ports(held)
    with ExitStack() as held, socket.socket() as user:
        user.bind(("", first + npu.HCCL_PORTS - 1))
        assert npu.claim_ports(held) != first
