# SPDX-License-Identifier: Apache-2.0
"""What a machine can do. The rest of the project asks for a feature, never for a product's name."""

import os
from dataclasses import dataclass
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
        has_mc2: MoE dispatch and combine kernels exist.
        has_mx: MXFP8 / MXFP4 operators exist.
    """

    name: str
    device_type: str
    product: Product
    memory_bytes: int
    memory_source: str
    float_types: tuple[str, ...]
    out_in_order: bool
    has_mc2: bool
    has_mx: bool


def _npu(name: Product, gib: int, source: str, *, has_mc2: bool, has_mx: bool) -> Features:
    return Features(
        name=name,
        device_type="npu",
        product=name,
        memory_bytes=gib * GIB,
        memory_source=source,
        float_types=("bfloat16", "float16"),
        out_in_order=False,
        has_mc2=has_mc2,
        has_mx=has_mx,
    )


# Memory: nominal figures; what the runtime leaves usable is a little less, which mem_fraction_static allows for.
NPU = {
    "a2": _npu("a2", 64, "Atlas A2: 64 GiB per NPU, nominal", has_mc2=True, has_mx=False),
    "a3": _npu("a3", 64, "Atlas A3: 64 GiB per die, nominal", has_mc2=True, has_mx=False),
    "950": _npu("950", 104, "Ascend 950PR: 112 GB (104 GiB) of the PCIe card, nominal", has_mc2=False, has_mx=True),
}


def cpu() -> Features:
    """This host's CPU, on which the reference kernels serve every operator."""
    return Features(
        name="cpu",
        device_type="cpu",
        product="a3",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_source="this host's physical memory",
        float_types=("bfloat16", "float16", "float32", "float64"),
        out_in_order=True,
        has_mc2=True,
        has_mx=True,
    )
