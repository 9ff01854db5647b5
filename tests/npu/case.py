# SPDX-License-Identifier: Apache-2.0
"""One call of a vendor operator: the call, its inputs, and what its outputs must be."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.npu.compare import Rule

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Normal:
    """A tensor to be drawn when the case runs: N(mean, scale^2), bfloat16."""

    shape: tuple[int, ...]
    scale: float = 1.0
    mean: float = 0.0


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        operator: name of the call; several cases share it.
        call: on tensors alone; everything else is bound.
        given: its tensors, those that are drawn at random as ``Normal``.
        rules: one per output.
    """

    recipe: str
    operator: str
    step: str
    call: "partial[Any]"
    given: tuple[Normal | Tensor, ...]
    rules: tuple[Rule, ...]

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.operator}-{self.step}".replace(" ", "_")

    @property
    def key(self) -> str:
        """What the call depends on, beyond random numbers: recipes of the same sizes share it."""
        shapes = [tuple(x.shape) for x in self.given]
        return f"{self.operator} {self.step} {self.call.func} {self.call.keywords} {shapes}"

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)

        def draw(x: Normal | Tensor) -> Tensor:
            if isinstance(x, Tensor):
                return x
            drawn = torch.empty(x.shape, dtype=torch.float32).normal_(x.mean, x.scale, generator=generator)
            return drawn.to(DTYPE)

        return [draw(x) for x in self.given]
