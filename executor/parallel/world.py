# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run: how one finds its number, meets the others, agrees with them, and learns that one is lost.

Two things connect the ranks. Collectives, which go over gloo for tensors on the host and over HCCL for tensors on an
NPU, whatever group they are called on. And a store, a table of keys that the launcher of the first machine keeps. It
answers while a rank is dead or hung, so through it the others find out which one that is.
"""

import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist

from executor.errors import UserError
from executor.parallel.groups import Group, forget_communicators
from executor.parallel.machines import LAUNCHER, integer

PEER_LOST = 75  # exit code of a rank that lost another; EX_TEMPFAIL of sysexits.h: it may work if tried again
PATIENCE_SECONDS = 600  # for another rank, unless parallel_config.timeout_seconds says otherwise
ROLL_CALL_SECONDS = 10  # for ranks that live: all of them wait for the one that is lost, so they notice together
POLL_SECONDS = 0.05
# What the two libraries and their error codes (EI0002: no notify from a remote rank) look like in a message.
COLLECTIVE = re.compile(r"gloo|hccl|\bE[IJ]\d{4}\b", re.IGNORECASE)

_store: dist.Store | None = None
_arrivals = 0


class PeerLost(UserError):
    """Another rank died, hangs, or never came. The command line exits with ``PEER_LOST``, by which the launcher knows
    that the cause is elsewhere."""


def rank() -> int:
    """This process's number among those that were started together; 0 when it was started alone."""
    return integer(os.environ, "RANK", 0, 65535) or 0


def launched() -> bool:
    """Whether this process is one of several that were started together, by our launcher or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_terminal() -> bool:
    """Whether this process prints answers, figures and notes: of several ranks the first one does."""
    return rank() == 0


def has_log() -> bool:
    """Whether what this rank prints goes to a file of its own, as our launcher arranges for all but the first."""
    return LAUNCHER in os.environ and rank() > 0


def started_ranks() -> int:
    """How many processes were started together. Raises UserError if this one's number is not among them."""
    size = integer(os.environ, "WORLD_SIZE", 1, 65536) or 1
    integer(os.environ, "RANK", 0, size - 1)
    return size


def die_with_launcher() -> None:
    """From here on this rank does not outlive a launcher that is killed (Linux; elsewhere collectives time out)."""
    if LAUNCHER not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, linux/prctl.h
    if os.getppid() != int(os.environ[LAUNCHER]):  # it was killed before
        os._exit(PEER_LOST)


def join(device_type: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
    """Initialise torch.distributed, once. Between CPUs tensors travel by gloo, between NPUs by HCCL (not run on a card
    yet); what lies on the host travels by gloo in both cases, in the same groups.

    Args:
        timeout_seconds: longest wait for the others here, and for a peer in a host-side collective.
    Raises:
        PeerLost: not all ranks came in time; the message names those that did not.
    """
    global _store
    if dist.is_initialized():
        return
    limit, size = timedelta(seconds=timeout_seconds), started_ranks()
    address, port = os.environ.get("MASTER_ADDR"), integer(os.environ, "MASTER_PORT", 1, 65535)
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise UserError(f"{missing} is not in the environment; start the ranks with scripts/infer.sh or torchrun")
    # our launcher and torchrun keep the store themselves; where neither did, rank 0 does
    host = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(address, port, is_master=host, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerLost(f"MASTER_ADDR={address}, MASTER_PORT={port}: no answer ({_first_sentence(error)})") from error
    _store = dist.PrefixStore("ranks", store)
    arrive("start", timeout_seconds)
    backend = "cpu:gloo,npu:hccl" if device_type == "npu" else "gloo"
    dist.init_process_group(backend, store=_store, rank=rank(), world_size=size, timeout=limit)


def leave() -> None:
    global _store
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_communicators()
        _store = None


def arrive(what: str, timeout_seconds: float) -> None:
    """Wait until all ranks are here. ``what`` is what they do before, such as ``load``; all call this equally often.

    Raises:
        PeerLost: not all came within ``timeout_seconds`` of this rank; the message names those that did not.
    """
    global _arrivals
    _arrivals += 1
    missing = _missing(f"{_arrivals} {what}", timeout_seconds)
    if missing:
        raise PeerLost(
            f"{_named(missing)} did not {what} within parallel_config.timeout_seconds={timeout_seconds:g} after rank "
            f"{rank()} did; was the command started there? A log there may say why, or raise that time"
        )


def _missing(event: str, seconds: float) -> list[int]:
    """Ranks that have not said ``event`` ``seconds`` from now; empty as soon as all have."""
    if _store is None:
        raise RuntimeError(f"{event}: this process has not joined the others")
    keys = [f"{event} {number}" for number in range(started_ranks())]
    _store.set(keys[rank()], "")
    deadline = time.monotonic() + seconds
    while not _store.check(keys):
        if time.monotonic() > deadline:
            return [number for number, key in enumerate(keys) if not _store.check([key])]
        time.sleep(POLL_SECONDS)
    return []


def lost_peer(error: Exception) -> PeerLost | None:
    """What ``error`` means if it came from a collective, else None. All ranks are called: those that do not answer
    within ``ROLL_CALL_SECONDS`` are named."""
    known = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and COLLECTIVE.search(str(error)))
    if _store is None or not known:
        return None
    files = (__file__, forget_communicators.__code__.co_filename)
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    where, what = f"{frames[-1] if frames else 'a collective'} of rank {rank()}", _first_sentence(error)
    try:
        missing = _missing("lost", ROLL_CALL_SECONDS)
    except RuntimeError:
        return PeerLost(f"{where} failed, and so did the launcher of the first machine: {what}")
    if not missing:
        return PeerLost(f"{where} failed although all ranks answer: {what}")
    hint = " (parallel_config.timeout_seconds)" if "timed out" in what.lower() else ""
    return PeerLost(f"{_named(missing)} did not take part in {where}: {what}{hint}")


def _named(ranks: Collection[int]) -> str:
    """``ranks`` in words. A machine of which all are missing is called by its number: nobody may have started it."""
    size = started_ranks()
    share = integer(os.environ, "LOCAL_WORLD_SIZE", 1, size) or size
    machines = [first // share for first in range(0, size, share) if set(range(first, first + share)) <= set(ranks)]
    if share == size:
        machines = []
    words = [f"machine {machine} (NODE_RANK={machine})" for machine in machines]
    others = [str(number) for number in ranks if number // share not in machines]
    if others:
        words.append(f"rank{'s' * (len(others) > 1)} {', '.join(others)}")
    return " and ".join(words)


def _first_sentence(error: Exception) -> str:
    """Without the place in the library's sources that gloo puts in front, and what is the same in all its errors."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error)).split("\n")[0].split(". ")[0]


def everyone() -> Group:
    """All ranks as a Group; of size 1 where this process is alone."""
    if not dist.is_initialized():
        return Group("world")
    return Group("world", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def share(ids: list[int], group: Group) -> list[int]:
    """``ids`` of the group's first rank on all its ranks; all give as many. Chosen tokens pass through here, so that no
    seed, clock or rounding of one rank can make its text another one's."""
    if group.size == 1 or not ids:
        return ids
    tensor = torch.tensor(ids, dtype=torch.int64)
    dist.broadcast(tensor, group=group.handle, group_src=0)
    return [int(i) for i in tensor.tolist()]


def largest(values: list[int], group: Group) -> list[int]:
    """The largest of each value over the group; all ranks give as many."""
    if group.size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.handle)
    return [int(v) for v in tensor.tolist()]


def collect(text: str, group: Group) -> list[str]:
    """Each rank's ``text``, in rank order, on every rank of the group."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    (most,) = largest([len(data)], group)
    lengths = group.all_gather(torch.tensor([len(data)]))
    rows = group.all_gather(torch.nn.functional.pad(data, (0, most - len(data))).unsqueeze(0))
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist())]
