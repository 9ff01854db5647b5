# SPDX-License-Identifier: Apache-2.0
"""The device under test: a card, or the CPU when these tests check themselves.

``NPU_SMOKE_DEVICE`` chooses: absent, the card if there is one; ``npu``, a card, and it is an error if there is none;
``cpu``, the reference kernels in place of a card, which shows that the tests can pass and that they can fail.
"""

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.platform import npu
from executor.platform.features import Product

VARIABLE = "NPU_SMOKE_DEVICE"
NO_CARD = "no Ascend card can be used here; on a machine with one: bash scripts/test_npu.sh (docs/on_a_card.md)"


def as_list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


@dataclass(frozen=True)
class Device:
    """
    Attributes:
        platform: what ``model_config.platform_version`` calls it.
        product: whose rounding points the CPU has to follow to be comparable.
        around: entered whenever this device computes. Nothing on a card; the self-check puts wrong kernels in here.
    """

    torch_device: torch.device
    platform: str
    product: Product
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        """``call`` on copies of ``inputs`` on this device, since kernels may write into them; results on the CPU."""
        with torch.inference_mode(), self.around():
            outputs = as_list(call(*(x.to(self.torch_device, copy=True) for x in inputs)))
            return [x.cpu() for x in outputs]

    def allocated(self) -> int:
        """Bytes that tensors occupy now: the allocator's count on a card, on a CPU the sum over all live storages."""
        gc.collect()
        if self.torch_device.type == "npu":
            return torch.npu.memory_allocated(self.torch_device)
        live = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in live if x.device.type == "cpu"
        }
        return sum(storages.values())


CPU = Device(torch.device("cpu"), "cpu", "a3")


def find() -> Device | None:
    """The device that ``NPU_SMOKE_DEVICE`` asks for; None if it asks for nothing and there is no card.

    Raises:
        RuntimeError: it asks for a card and there is none, or for something else.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "cpu":
        return CPU
    if wanted not in ("", "npu"):
        raise RuntimeError(f"{VARIABLE}={wanted}: use npu or cpu, or leave it out")
    product = npu.detect()
    if product is not None:
        return Device(torch.device("npu", 0), product, product)
    if wanted == "npu":
        raise RuntimeError(f"{VARIABLE}=npu, but {NO_CARD}")
    return None
