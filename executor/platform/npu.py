# SPDX-License-Identifier: Apache-2.0
"""The only place that imports torch_npu for a real run: which card is ours, and how its communicators are made.

Nothing here has been run on a card. Sources: the torch_npu 2.13.0 wheel, the guide "pg_options" of Ascend Extension for
PyTorch 7.2.0 (featuresguide_00016 on hiascend.com), and CANN's pages on the HCCL_* variables (envref_07_*).
"""

import importlib.util
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from executor.errors import UserError

LAYERS, MC2 = "layers", "mc2"  # what communicators are for
AIV = 3  # hccl_op_expansion_mode: 0 as the environment says, 1 host CPU, 2 AI CPU, 3 vector cores (the guide above)
WITH_AIV = ("a2", "a3")  # the page of HCCL_OP_EXPANSION_MODE calls AIV unsupported on the 950 series for now
HCCL_PORTS = 32  # that HCCL takes from HCCL_IF_BASE_PORT on (envref_07_0074)
FIRST_PORT, LAST_PORT = 61000, 65520  # above Linux's ephemeral ports; the highest base that HCCL accepts


def load_torch_npu() -> bool:
    """Import torch_npu where there is a card; returns whether it did. It must come before our own operator
    definitions, which give way to the vendor's: ``executor.ops`` calls this first."""
    if importlib.util.find_spec("torch_npu") is None or not os.path.exists("/dev/davinci_manager"):
        return False
    import torch_npu  # noqa: F401  # registers torch.npu and the npu:: operators

    return True


def device_index() -> int:
    """The NPU of this process among those it sees: one per rank of a machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def detect() -> str | None:
    """``a2``, ``a3`` or ``950`` if an NPU can be used from this process, else None. Makes NPU ``device_index()`` the
    current one, so that no rank opens another's.

    Product names are as ``torch.npu.get_device_name`` gives them: Ascend910B* is Atlas A2, Ascend910_93* is Atlas A3,
    Ascend950* and Ascend910_95* are the 950 series.

    Raises:
        UserError: there are fewer NPUs than ranks on this machine.
        RuntimeError: there is a card, but of a product that this project does not know.
    """
    if not load_torch_npu():
        return None
    import torch

    if not torch.npu.is_available():  # type: ignore[attr-defined]
        return None
    index, count = device_index(), torch.npu.device_count()  # type: ignore[attr-defined]
    if index >= count:
        raise UserError(
            f"LOCAL_RANK={index}, but this machine shows {count} NPUs: lower parallel_config.world_size, name more "
            "machines in parallel_config.hosts, or let ASCEND_RT_VISIBLE_DEVICES show more"
        )
    torch.npu.set_device(index)  # type: ignore[attr-defined]
    name = torch.npu.get_device_name(index)  # type: ignore[attr-defined]
    for prefix, product in (
        ("Ascend910B", "a2"),
        ("Ascend910_93", "a3"),
        ("Ascend950", "950"),
        ("Ascend910_95", "950"),
    ):
        if name.startswith(prefix):
            return product
    raise RuntimeError(f"unknown NPU {name!r}: set model_config.platform_version to a2, a3 or 950")


def free_bytes() -> int:
    """Memory of the current NPU that nobody has yet."""
    import torch

    return int(torch.npu.mem_get_info()[0])  # type: ignore[attr-defined]


def purpose(group_name: str) -> str:
    """Which groups may share a communicator: those of one purpose. The MC2 kernels need one to themselves."""
    return MC2 if group_name == "moe_ep_mc2" else LAYERS


def hccl_config(
    purpose: str, product: str, buffer_mib: int | None, *, alone: bool, variables: Mapping[str, str] = os.environ
) -> dict[str, int]:
    """Settings of a communicator, as ``ProcessGroupHCCL.Options.hccl_config`` takes them. What is left out follows the
    HCCL_* environment variables; what is set here would override them.

    On vector cores (AIV) a small collective starts sooner. But there it takes cores from a kernel that runs beside it,
    and no two communicators may be in that mode at once (HCCL_OP_EXPANSION_MODE, envref_07_0096). Waiting for each
    other, AIV collectives and MC2 kernels have hung (vllm-project/vllm-ascend issues 3881 and 14928). So only a
    communicator for layers that is the rank's only one gets AIV, where the user did not choose.

    Args:
        alone: whether this is the only communicator of each of its ranks.
        buffer_mib: HCCL keeps two buffers of this size per communicator, in MiB; None is HCCL_BUFFSIZE, or 200.
    """
    config = {} if buffer_mib is None else {"hccl_buffer_size": buffer_mib}
    chosen = "HCCL_OP_EXPANSION_MODE" in variables
    if purpose == LAYERS and alone and product in WITH_AIV and not chosen:
        config["hccl_op_expansion_mode"] = AIV
    return config


def group_options(purpose: str, buffer_mib: int | None = None, *, alone: bool = False) -> Any:
    """What to create a communicator of ``purpose`` with (see ``hccl_config``); None where there is no card."""
    product = detect()
    if product is None:
        return None
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = hccl_config(purpose, product, buffer_mib, alone=alone)
    return options


def communicator_name(process_group: Any, rank: int) -> str:
    """The name by which a fused communication operator finds ``process_group``; ``rank`` counts within it. On an NPU
    the first call creates the communicator, so all ranks of the group have to make it."""
    import torch

    if any(device.type == "npu" for device in process_group._device_types):
        return str(process_group._get_backend(torch.device("npu")).get_hccl_comm_name(rank))
    return str(process_group.group_name)


def launch_environment(held: ExitStack, machines: int, timeout_seconds: float) -> dict[str, str]:
    """Variables for the ranks of this machine, where the user's environment does not set them (docs/launch.md).

    Args:
        held: keeps a range of ports ours until it is closed.
    """
    limit = int(timeout_seconds)
    variables = {
        "HCCL_CONNECT_TIMEOUT": str(min(max(limit, 120), 7200)),  # its range, envref_07_0077
        "HCCL_EXEC_TIMEOUT": str(max(limit, 1)),  # 0 would be for ever, envref_07_0078
        "CPU_AFFINITY_CONF": "1",  # torch_npu: each NPU's process on its share of the cores
    }
    if machines == 1:  # machines would have to choose the same ports
        variables["HCCL_IF_BASE_PORT"] = str(claim_ports(held))
    return variables


def claim_ports(held: ExitStack) -> int:
    """The first of ``HCCL_PORTS`` ports that are free, and that no other launcher on this host claims before ``held``
    is closed. The claim is an abstract socket, which the kernel forgets with its process; HCCL listens only later.

    Raises:
        UserError: there are none.
    """
    for first in range(FIRST_PORT, LAST_PORT + 1, HCCL_PORTS):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0qwen3-recipes-hccl-{first}")
            for port in range(first, min(first + HCCL_PORTS, 65536)):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            claim.close()
            continue
        held.enter_context(claim)
        return first
    raise UserError(f"no {HCCL_PORTS} free ports in a row from {FIRST_PORT} on for HCCL; set HCCL_IF_BASE_PORT")
