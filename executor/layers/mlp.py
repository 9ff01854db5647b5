# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward block: merged gate and up projections, SwiGLU, down projection."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from executor.batch import Batch, Phase
from executor.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from executor.model_config import ModelConfig
from executor.ops.forms import Forms
from executor.parallel.groups import Group
from executor.parallel.layout import Tokens, shard
from executor.quant.scheme import LinearScheme
from executor.storage import Storage
from executor.weights import Slot


class MLP(nn.Module):
    """Both matrices split over ``group``; ``tokens`` says for each phase how tokens get to its ranks."""

    def __init__(
        self,
        config: ModelConfig,
        group: Group,
        tokens: Mapping[Phase, Tokens],
        storage: Storage,
        scheme: LinearScheme,
        forms: Forms,
    ) -> None:
        super().__init__()
        self.forms = forms
        self.tokens = tokens
        width = config.intermediate_size
        mine = shard(width, group, "intermediate_size")
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            (Part("gate_proj", width, mine), Part("up_proj", width, mine)),
            bias=False,
            storage=storage,
            scheme=scheme,
        )
        self.down_proj = RowParallelLinear(
            Part("down_proj", width, mine),
            config.hidden_size,
            bias=False,
            holds_bias=False,
            storage=storage,
            scheme=scheme,
        )

    def partial(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = self.tokens[batch.phase].enter(x, batch)
        return self.down_proj(self.forms.swiglu(self.gate_up_proj(x)))

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.tokens[batch.phase].leave(y, batch)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate_up_proj.slots(prefix)
        yield from self.down_proj.slots(prefix)
