# SPDX-License-Identifier: Apache-2.0
"""The vendor's operator schemas that this project relies on, and the place where reference kernels are registered.

With torch_npu in the process the ``npu::`` schemas are the vendor's own, and our reference kernels are registered
for the CPU key only (torch_npu ships none). Without it we define the same text, and register the Meta kernels too,
so that every module runs on ``meta`` and under fake tensors. Layers never see the difference.

Source of the text: ``torch.ops.npu.*`` of the torch_npu 2.13.0 wheel.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# name -> arguments and returns, exactly as the wheel prints them (float defaults keep their printed digits)
SCHEMAS: dict[str, str] = {}

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_library = torch.library.Library("npu", "FRAGMENT")
_graph_library = torch.library.Library("air", "FRAGMENT")
_defined_here: set[str] = set()


def define(name: str, text: str) -> None:
    """Record the vendor's ``text`` for ``npu::name``; define the operator unless torch_npu already did."""
    SCHEMAS[name] = text
    if not hasattr(torch.ops.npu, name):
        _library.define(name + text)
        _defined_here.add(name)


def reference(name: str) -> Callable[[_Kernel], _Kernel]:
    """Register the decorated function as the CPU kernel of ``npu::name``."""

    def register(kernel: _Kernel) -> _Kernel:
        _library.impl(name, kernel, "CPU")
        return kernel

    return register


def meta(name: str) -> Callable[[_Kernel], _Kernel]:
    """Register the decorated function as the Meta kernel of ``npu::name``, where the vendor's is absent."""

    def register(kernel: _Kernel) -> _Kernel:
        if name in _defined_here:
            _library.impl(name, kernel, "Meta")
        return kernel

    return register


def define_for_graphs(name: str, text: str, kernel: Callable[..., Any], meta_kernel: Callable[..., Any]) -> None:
    """``air::name``, by which compiled graphs call a kernel with lengths that are tensors. torchair defines it in a
    module of its own when it needs it, and fails if somebody did so before: with torch_npu in the process that module
    comes first, and only its CPU kernel, which raises, is replaced."""
    if "torch_npu" in sys.modules:
        importlib.import_module("torchair")
        importlib.import_module(f"torchair.ops._{name}")
    else:
        _graph_library.define(name + text)
        _graph_library.impl(name, meta_kernel, "Meta")
    _graph_library.impl(name, kernel, "CPU", allow_override=True)
