# SPDX-License-Identifier: Apache-2.0
"""From one command to as many processes as the recipe has ranks, of which the first one speaks.

Each rank is the same command again, with the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT), so torchrun itself may start them too. Here one parent per machine watches its ranks: the
first that fails is named with its reason, and none outlives it.

The parent on the first machine keeps the store through which ranks find each other and parents tell each other what
failed. It opens the port before it starts a rank and never lets go of it, so no two jobs can be given the same one.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from executor.errors import UserError
from executor.parallel.machines import LAUNCHER, ONLY_MACHINE, Machine
from executor.parallel.world import PATIENCE_SECONDS, PEER_LOST, PeerLost
from executor.platform import npu

GRACE_SECONDS = 5.0  # between asking the ranks to end and ending them
SETTLE_SECONDS = 1.0  # after a rank failed: for a better witness of the same failure
POLL_SECONDS = 0.05
FAILED, DONE = "failed", "done"  # keys of the store: the first failure of any machine; how many have finished


def run_ranks(
    size: int,
    command: list[str],
    log_folder: Path,
    *,
    machine: Machine = ONLY_MACHINE,
    device_type: str = "cpu",
    timeout_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Run ``command`` as this machine's share of ``size`` ranks and wait for them.

    Rank 0 keeps this terminal; rank N writes to ``log_folder/rank<N>.log``.

    Args:
        timeout_seconds: longest wait for another machine, and for the last rank once the first has ended.
    Returns:
        0, or the exit code of rank 0 if it was the first to fail, since it has said why.
    Raises:
        UserError: a rank was killed, another than rank 0 failed, or another machine did; the message says why.
            PeerLost: all that is known is that ranks lost another. KeyboardInterrupt: Ctrl-C. No rank is left.
    """
    share = size // machine.count
    numbers = range(machine.rank * share, (machine.rank + 1) * share)
    _prepare(log_folder, size, machine)
    own = f"ranks {numbers[0]} to {numbers[-1]}" if share > 1 else f"rank {numbers[0]}"
    what = f"starting {own} of {size}, logs in {log_folder}"
    if machine.count > 1:  # what is missing if nothing more comes
        others = f"{machine.count - 1} other{'s' * (machine.count > 2)}"
        what += f"; machine {machine.rank} meets {others} at {machine.address}:{machine.port}"
    print(what, file=sys.stderr, flush=True)
    store = _open_store(machine, timeout_seconds)
    with ExitStack() as stack:
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // share)),
            **({"GLOO_SOCKET_IFNAME": "lo"} if machine.count == 1 and sys.platform == "linux" else {}),
            **(npu.launch_environment(stack, machine.count, timeout_seconds) if device_type == "npu" else {}),
            **os.environ,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(share),
            "MASTER_ADDR": machine.address,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun's way to say that the store is there already
            LAUNCHER: str(os.getpid()),
        }
        job = _Job(machine, store, {rank: log_folder / f"rank{rank}.log" for rank in numbers if rank})
        try:
            for local, rank in enumerate(numbers):
                job.start(rank, command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(local)})
            failure = job.watch(timeout_seconds) or job.wait_for_machines(timeout_seconds)
            if failure is not None and failure.rank is not None:
                job.tell_machines(failure.text)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is being done; another one would leave ranks behind
            job.tell_machines("interrupted")
            raise
        finally:
            job.end()
    if failure is None:
        return 0
    if failure.rank == 0 and failure.code > 0:
        return failure.code
    kind = PeerLost if failure.code == PEER_LOST else UserError
    log = f"; all that rank {failure.rank} printed is in {job.logs[failure.rank]}" if failure.rank in job.logs else ""
    raise kind(f"{failure.text}; the other ranks were ended{log}")


def _prepare(log_folder: Path, size: int, machine: Machine) -> None:
    """Make the folder, and remove what an earlier job left in it that nobody is going to overwrite. Machines may share
    the folder, so a log of another machine's rank stays: it may be of this job."""
    log_folder.mkdir(parents=True, exist_ok=True)
    for path in log_folder.glob("rank*.log"):
        number = path.stem.removeprefix("rank")
        if machine.count == 1 or (number.isdigit() and int(number) >= size):
            path.unlink()


def _open_store(machine: Machine, timeout_seconds: float) -> dist.TCPStore:
    place = f"MASTER_ADDR={machine.address}, MASTER_PORT={machine.port}"
    deadline = time.monotonic() + timeout_seconds
    while (problem := _unreachable(machine)) is not None:
        if machine.rank == 0:
            raise UserError(f"{place}: {problem}; give an address or a name of this machine, which has NODE_RANK=0")
        if time.monotonic() > deadline:
            hint = "start machine 0, or check the address"
            raise PeerLost(f"{place}: no answer within {timeout_seconds:g} s ({problem}); {hint}")
        time.sleep(0.5)
    limit, first = timedelta(seconds=timeout_seconds), machine.rank == 0
    try:
        return dist.TCPStore(machine.address, machine.port, is_master=first, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={machine.port} is taken on this machine; set another, on all machines"
            ) from error
        raise PeerLost(f"{place}: {str(error).splitlines()[0]}") from error


def _unreachable(machine: Machine) -> str | None:
    """Why the store cannot be reached now, or None. Machine 0 is asked for the name only: it opens the store itself."""
    try:
        if machine.rank == 0:
            socket.getaddrinfo(machine.address, machine.port)
        else:
            socket.create_connection((machine.address, machine.port), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


@dataclass(frozen=True)
class _Failure:
    """``rank`` None: on another machine. ``code`` is negative for a signal, as subprocess has it; 0: still running."""

    text: str
    rank: int | None = None
    code: int = 0


@dataclass
class _Job:
    machine: Machine
    store: dist.TCPStore
    logs: dict[int, Path]
    ranks: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        with self.logs[rank].open("wb") if rank else nullcontext() as log:  # rank 0 keeps the terminal
            nothing = subprocess.DEVNULL if rank else None
            self.ranks[rank] = subprocess.Popen(command, env=environment, stdin=nothing, stdout=log, stderr=log)

    def watch(self, timeout_seconds: float) -> _Failure | None:
        """The failure to report, or None when all ranks are done. Best is a rank that was killed, then one that failed
        by itself, of these rank 0 since it has already said so, and last one that lost another."""
        failed: dict[int, int] = {}  # in the order of failing
        failed_at = done_at = 0.0
        while True:
            codes, now = {rank: process.poll() for rank, process in self.ranks.items()}, time.monotonic()
            failed_at = failed_at if failed else now
            failed.update((rank, code) for rank, code in codes.items() if code)
            causes = [rank for rank, code in failed.items() if code != PEER_LOST]
            killed = [rank for rank in causes if failed[rank] < 0]
            if killed or 0 in causes or (failed and now - failed_at > SETTLE_SECONDS):
                rank = [*killed, *sorted(causes, key=bool), *sorted(failed)][0]
                return _Failure(self._reason(rank, failed[rank]), rank, failed[rank])
            heard = self._heard()
            if heard is not None:
                return _Failure(heard)
            if all(code == 0 for code in codes.values()):
                return None
            running = [rank for rank, code in codes.items() if code is None]
            done_at = now if len(running) == len(codes) else done_at
            if now - done_at > timeout_seconds and not failed:
                return _Failure(f"rank {running[0]} did not end within {timeout_seconds:g} s of the first", running[0])
            time.sleep(POLL_SECONDS)

    def _reason(self, rank: int, code: int) -> str:
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"rank {rank} was ended by {known.get(-code, f'signal {-code}')}"
        text = self.logs[rank].read_text(errors="replace") if rank in self.logs else "machine 0 has printed why"
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"]
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
        return said[-1] if code == PEER_LOST else f"rank {rank} failed with exit code {code}: {said[-1]}"

    def _heard(self) -> str | None:
        """What the launcher of another machine said."""
        if self.machine.count == 1:
            return None
        try:
            return self.store.get(FAILED).decode() if self.store.check([FAILED]) else None
        except RuntimeError:
            return "the launcher of machine 0 is gone"

    def tell_machines(self, text: str) -> None:
        if self.machine.count > 1:
            with suppress(RuntimeError):  # a store that is gone tells them as much
                self.store.compare_set(FAILED, "", f"machine {self.machine.rank} ({socket.gethostname()}): {text}")
            if self.machine.rank == 0:
                time.sleep(SETTLE_SECONDS)  # the store goes with this process, so let the others read

    def wait_for_machines(self, timeout_seconds: float) -> _Failure | None:
        """Once the ranks of this machine are done: machine 0 keeps the store until those of all are."""
        if self.machine.count == 1:
            return None
        with suppress(RuntimeError):
            self.store.add(DONE, 1)
        deadline = time.monotonic() + timeout_seconds
        while self.machine.rank == 0 and (done := self.store.add(DONE, 0)) < self.machine.count:
            heard = self._heard()
            if heard is not None or time.monotonic() > deadline:
                return _Failure(heard or f"{done} of {self.machine.count} machines ended within {timeout_seconds:g} s")
            time.sleep(POLL_SECONDS)
        return None

    def end(self) -> None:
        """End the ranks that still run: first they are asked to, also those that are stopped."""
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.ranks.values():
            if process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)
        for process in self.ranks.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
