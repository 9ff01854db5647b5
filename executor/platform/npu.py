# SPDX-License-Identifier: Apache-2.0
"""The only place that imports torch_npu for a real run: is there a card, and which product is it."""

import importlib.util
import os
from typing import Any


def load_torch_npu() -> bool:
    """Import torch_npu where there is a card; returns whether it did. It must come before our own operator
    definitions, which give way to the vendor's: ``executor.ops`` calls this first."""
    if importlib.util.find_spec("torch_npu") is None or not os.path.exists("/dev/davinci_manager"):
        return False
    import torch_npu  # noqa: F401  # registers torch.npu and the npu:: operators

    return True


def detect() -> str | None:
    """``a2``, ``a3`` or ``950`` if an NPU can be used from this process, else None.

    Product names are as ``torch.npu.get_device_name`` gives them: Ascend910B* is Atlas A2, Ascend910_93* is Atlas A3,
    Ascend950* and Ascend910_95* are the 950 series. Not run on a card yet.

    Raises:
        RuntimeError: there is a card, but of a product that this project does not know.
    """
    if not load_torch_npu():
        return None
    import torch

    if not torch.npu.is_available():  # type: ignore[attr-defined]
        return None
    name = torch.npu.get_device_name(0)  # type: ignore[attr-defined]
    for prefix, product in (
        ("Ascend910B", "a2"),
        ("Ascend910_93", "a3"),
        ("Ascend950", "950"),
        ("Ascend910_95", "950"),
    ):
        if name.startswith(prefix):
            return product
    raise RuntimeError(f"unknown NPU {name!r}: set model_config.platform_version to a2, a3 or 950")


def purpose(group_name: str) -> str:
    """Which groups may share a communicator: those of one purpose. The MC2 kernels need one to themselves."""
    return "mc2" if group_name == "moe_ep_mc2" else "layers"


def group_options(purpose: str) -> Any:
    """What to create a communicator of ``purpose`` with; None where there is no card."""
    return None


def communicator_name(process_group: Any, rank: int) -> str:
    """The name by which a fused communication operator finds ``process_group``."""
    return str(process_group.group_name)
