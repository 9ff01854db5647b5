# SPDX-License-Identifier: Apache-2.0
"""What a machine can do. The rest of the project asks for a feature, never for a product's name."""

import os
from collections.abc import Collection
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
        runtime_bytes: what of it the driver and the runtime take in each process, communicators' buffers apart.
        float_types: dtypes that the operators accept.
        exe_modes: ways to execute a decode step.
        fused: operators of ``fusion_plan.NAMES`` whose fused kernel the vendor documents for this product.
        out_in_order: matrices are stored ``[out, in]`` (see ``storage.py``).
    """

    name: str
    device_type: str
    product: Product
    memory_bytes: int
    memory_source: str
    runtime_bytes: int
    float_types: tuple[str, ...]
    exe_modes: tuple[str, ...]
    fused: frozenset[str]
    out_in_order: bool


FUSED = frozenset(("rotary", "write_kv", "gate_topk", "add_rms_norm", "swiglu", "combine_add_rms_norm"))


def _npu(name: Product, gib: float, source: str, *, lacks: Collection[str]) -> Features:
    return Features(
        name=name,
        device_type="npu",
        product=name,
        memory_bytes=int(gib * GIB),
        memory_source=source,
        runtime_bytes=int(0.4 * GIB),
        float_types=("bfloat16", "float16"),
        exe_modes=("eager", "ge_graph", "npugraph_ex"),
        fused=FUSED.difference(lacks),
        out_in_order=False,
    )


# Memory: of 64 GiB nominal a process sees less. The figures are the total capacity that torch_npu printed in users'
# reports of running out of memory: 60.96 GiB on A2 (vllm-project/vllm-ascend issue 5020), 61.27 GiB on a die of A3
# (sgl-project/sglang issue 29838). For the 950PR no such report was found: 104 GiB nominal, less as much as A2 loses.
# What a process takes besides torch's pool: 0.36 GiB (total less reserved and free, vllm-ascend issue 1987), rounded.
# Operators: op-plugin's pages name A2 and A3 for npu_scatter_pa_kv_cache, A3 alone for the combine with a norm.
_REPORTED = "what is usable of the 64 GiB of an Atlas {}, as users report"
_DEDUCED = "the 104 GiB (112 GB) of an Ascend 950PR PCIe card, less what A2 loses; no report found"
NPU = {
    "a2": _npu("a2", 60.96, _REPORTED.format("A2 NPU"), lacks=("combine_add_rms_norm",)),
    "a3": _npu("a3", 61.27, _REPORTED.format("A3 die"), lacks=()),
    "950": _npu("950", 99.0, _DEDUCED, lacks=("write_kv", "combine_add_rms_norm")),
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
        runtime_bytes=0,
        float_types=("bfloat16", "float16", "float32", "float64"),
        exe_modes=("eager", "inductor"),
        fused=FUSED,
        out_in_order=True,
    )
