# SPDX-License-Identifier: Apache-2.0
"""Which of a run's machines this one is, read from the environment or from parallel_config.hosts.

Imports no torch, so that the first lines of a process may ask.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from executor.errors import UserError

LAUNCHER = "EXECUTOR_LAUNCHER_PID"  # in a rank's environment: the process that started it
DEFAULT_PORT = 29500  # of the store, with several machines; torchrun's default too


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine among the ``count`` of a run. The store is at ``address`` and ``port``; 0 is any free port."""

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0


ONLY_MACHINE = Machine()


def this_machine(hosts: Sequence[str], world_size: int, variables: Mapping[str, str] = os.environ) -> Machine:
    """Find this machine by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in ``variables``, or else by looking which
    entry of ``hosts`` (parallel_config.hosts) is an address or a name of it.

    Raises:
        UserError: a variable is missing or wrong, or no entry of ``hosts``, or more than one, is this machine.
    """
    count = integer(variables, "NNODES", 1, 65536) or len(hosts) or 1
    if hosts and count != len(hosts):
        raise UserError(f"NNODES={count}, but parallel_config.hosts has {len(hosts)} entries; leave one of the two out")
    if world_size % count:
        raise UserError(f"NNODES={count} does not divide parallel_config.world_size={world_size}, as it has to")
    rank = integer(variables, "NODE_RANK", 0, count - 1)
    if rank is None and hosts:
        rank = _position(hosts)
    if count == 1:
        return Machine(port=integer(variables, "MASTER_PORT", 1, 65535) or 0)
    address = variables.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if rank is None or not address:
        raise UserError(
            f"NNODES={count} needs {'NODE_RANK' if rank is None else 'MASTER_ADDR'} in the environment: NODE_RANK is "
            f"0 to {count - 1}, another on each machine, MASTER_ADDR the address of the machine with 0"
        )
    port = integer(variables, "MASTER_PORT", 1, 65535) or DEFAULT_PORT
    return Machine(rank=rank, count=count, address=address, port=port)


def integer(variables: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """The variable ``name``, None if it is absent or empty. Raises UserError if it is not an integer of the range."""
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        hint = "; NNODES is how many machines there are" if name == "NODE_RANK" else ""
        raise UserError(f"{name}={text} in the environment: expected an integer from {low} to {high}{hint}")
    return int(text)


def _position(hosts: Sequence[str]) -> int:
    found = [number for number, host in enumerate(hosts) if _is_here(host)]
    if len(found) != 1:
        what = f"entries {found} are all" if found else "no entry is"
        raise UserError(
            f"parallel_config.hosts={list(hosts)}: {what} this machine ({socket.gethostname()}); list one address or "
            "resolvable name per machine, or set NODE_RANK in the environment"
        )
    return found[0]


def _is_here(host: str) -> bool:
    """Whether ``host`` names this machine: only a local address can be bound to."""
    if host == socket.gethostname():
        return True
    with suppress(OSError):  # a name that does not resolve
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
