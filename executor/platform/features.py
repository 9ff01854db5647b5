# SPDX-License-Identifier: Apache-2.0
"""What a machine can do. The rest of the project asks for a feature, never for a product's name."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 1 << 30
Product = Literal["a2", "a3", "950"]


@dataclass(frozen=True, kw_only=True)
class Features:
    """
    Attributes:
        name: what the user calls this machine (``model_config.platform_version``).
        device_type: torch's device type.
        product: whose rounding points the reference kernels follow; on a CPU, those of the recipes' product.
        memory_bytes: memory of one device.
        memory_source: where that number comes from.
        float_types: dtypes that the operators accept.
        out_in_order: matrices are stored ``[out, in]`` (see ``storage.py``).
    """

    name: str
    device_type: str
    product: Product
    memory_bytes: int
    memory_source: str
    float_types: tuple[str, ...]
    out_in_order: bool


def _npu(name: Product, gib: int, source: str) -> Features:
    return Features(
        name=name,
        device_type="npu",
        product=name,
        memory_bytes=gib * GIB,
        memory_source=source,
        float_types=("bfloat16", "float16"),
        out_in_order=False,
    )


# Memory: nominal figures; what the runtime leaves usable is a little less, which mem_fraction_static allows for.
NPU = {
    "a2": _npu("a2", 64, "Atlas A2: 64 GiB per NPU, nominal"),
    "a3": _npu("a3", 64, "Atlas A3: 64 GiB per die, nominal"),
    "950": _npu("950", 104, "Ascend 950PR: 112 GB (104 GiB) of the PCIe card, nominal"),
}


def _available_memory() -> tuple[int, str]:
    """Bytes that this process may still use: the kernel's estimate for the host, or the cgroup's limit if lower."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    host = free.get("MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    if text != "max" and int(text) < host:
        return int(text), "the memory limit of this control group"
    return host, "this host's available memory"


def cpu() -> Features:
    """This host's CPU, on which the reference kernels serve every operator."""
    memory, source = _available_memory()
    return Features(
        name="cpu",
        device_type="cpu",
        product="a3",
        memory_bytes=memory,
        memory_source=source,
        float_types=("bfloat16", "float16", "float32", "float64"),
        out_in_order=True,
    )
