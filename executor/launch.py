# SPDX-License-Identifier: Apache-2.0
"""From one command to as many processes as the recipe has ranks, of which the first one speaks.

Each rank is the same command again, with the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT), so torchrun itself may start them too. Here one parent watches them all: the first rank
that fails is named with its reason, and none outlives it.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from executor.errors import UserError

GRACE_SECONDS = 5.0  # between asking the ranks to end and ending them
POLL_SECONDS = 0.05


def run_ranks(size: int, command: list[str], log_folder: Path) -> int:
    """Run ``command`` as ``size`` ranks on this machine and wait for them.

    Rank 0 keeps this terminal; rank N writes to ``log_folder/rank<N>.log``.

    Returns:
        0, or the exit code of rank 0 if it was the first to fail, since it has said why.
    Raises:
        UserError: another rank failed, or rank 0 was killed; the message names it and says why. KeyboardInterrupt:
        Ctrl-C. In any case no rank is left.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    logs = {rank: log_folder / f"rank{rank}.log" for rank in range(1, size)}
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **os.environ,
        "WORLD_SIZE": str(size),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                ranks.append(subprocess.Popen(command, env=own))
            else:
                with logs[rank].open("wb") as log:
                    ranks.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        failed = _wait(ranks)
    finally:
        _end(ranks)
    if failed == 0 and ranks[0].returncode > 0:
        return ranks[0].returncode
    if failed is not None:
        raise UserError(_reason(failed, ranks[failed].returncode, logs.get(failed)))
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that failed, or None when all are done. A rank that was ended by another's fate fails later."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            # one that was killed outright is the cause; those that lost their peer only noticed
            return next((rank for rank in failed if (codes[rank] or 0) < 0), failed[0])
        if all(code == 0 for code in codes):
            return None
        time.sleep(POLL_SECONDS)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(rank: int, code: int, log: Path | None) -> str:
    if code < 0:
        why = f"was ended by {signal.Signals(-code).name}"
    else:
        lines = log.read_text(errors="replace").split("\n") if log is not None else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "its message is above")
        why = f"failed with exit code {code}: {last.removeprefix('error: ')}"
    where = f"; all it printed is in {log}" if log is not None else ""
    return f"rank {rank} {why}; the other ranks were ended{where}"
