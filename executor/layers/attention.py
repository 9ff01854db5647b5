# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over the paged cache, with Qwen3's per-head normalisation of queries and keys.

Shapes: T tokens of the step, N query heads and M key/value heads of this rank, D head size.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from executor.batch import Batch, Phase
from executor.kv_cache import LayerCache
from executor.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from executor.layers.norm import RMSNorm
from executor.model_config import ModelConfig
from executor.ops.attention import paged_attention
from executor.ops.forms import Forms
from executor.parallel.groups import Group
from executor.parallel.layout import Residual, ShardedResidual, shard, shard_kv_heads
from executor.quant.scheme import LinearScheme
from executor.storage import Storage
from executor.weights import Slot


class SummedHeads:
    """``o_proj`` of this rank's heads is a summand of the result."""

    def __init__(self, o_proj: RowParallelLinear, residual: Residual) -> None:
        self.o_proj = o_proj
        self.residual = residual

    def partial(self, out: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.o_proj(out)

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.residual.leave(y, batch)


class ExchangedHeads:
    """Ranks exchange this rank's heads of all tokens for all heads of its own tokens; ``o_proj``, which keeps all
    inputs, then gives the result itself. A rank's heads are ``num_heads * head_dim / size`` wide, so this moves less
    than a reduce-scatter of ``o_proj``'s output, which is as wide as the hidden size."""

    def __init__(self, o_proj: RowParallelLinear, residual: ShardedResidual) -> None:
        self.o_proj = o_proj
        self.residual = residual

    def partial(self, out: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.o_proj(self.residual.heads_to_tokens(out, batch))

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return y


class Attention(nn.Module):
    """Heads split over ``group``. In a phase of ``exchange`` heads are exchanged for tokens before ``o_proj``, which is
    then held whole; other phases use this rank's rows of it."""

    def __init__(
        self,
        config: ModelConfig,
        group: Group,
        residual: Mapping[Phase, Residual],
        exchange: Collection[Phase],
        storage: Storage,
        scheme: LinearScheme,
        forms: Forms,
    ) -> None:
        super().__init__()
        self.forms = forms
        self.residual = residual
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        heads = shard(config.num_attention_heads, group, "num_attention_heads")
        kv_heads = shard_kv_heads(config.num_key_value_heads, group)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)

        def part(name: str, total: int, keep: range) -> Part:
            return Part(name, total * self.head_dim, range(keep.start * self.head_dim, keep.stop * self.head_dim))

        self.merged_qkv_proj = ColumnParallelLinear(
            config.hidden_size,
            (
                part("q_proj", config.num_attention_heads, heads),
                part("k_proj", config.num_key_value_heads, kv_heads),
                part("v_proj", config.num_key_value_heads, kv_heads),
            ),
            bias=config.attention_bias,
            storage=storage,
            scheme=scheme,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, storage, forms)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, storage, forms)

        def row_parallel(keep: range, holds_bias: bool) -> RowParallelLinear:
            return RowParallelLinear(
                part("o_proj", config.num_attention_heads, keep),
                config.hidden_size,
                bias=config.attention_bias,
                holds_bias=holds_bias,
                storage=storage,
                scheme=scheme,
            )

        rows = row_parallel(heads, group.rank == 0)
        self.o_proj = row_parallel(range(config.num_attention_heads), True) if exchange else rows
        if exchange:
            rows.borrow(self.o_proj)
            self.o_proj_rows = rows
        self.output: dict[Phase, SummedHeads | ExchangedHeads] = {}
        for phase, tokens in residual.items():
            if phase in exchange and isinstance(tokens, ShardedResidual):
                self.output[phase] = ExchangedHeads(self.o_proj, tokens)
            else:
                self.output[phase] = SummedHeads(rows, tokens)

    def partial(
        self, x: torch.Tensor, rotary_table: tuple[torch.Tensor, torch.Tensor], batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        """``[own tokens, hidden] -> [T, hidden]``, this rank's heads' share of the sum, or ``[own tokens, hidden]`` if
        heads were exchanged. Writes this step's keys and values."""
        x = self.residual[batch.phase].enter(x, batch)
        q, k, v = self.merged_qkv_proj(x).split(self.merged_qkv_proj.sizes, dim=-1)
        q_TND = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k_TMD = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v_TMD = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        q_TND, k_TMD = self.forms.rotary(q_TND, k_TMD, *rotary_table)
        self.forms.write_kv(k_TMD, v_TMD, cache.key, cache.value, batch.slot_mapping)
        out_TND = paged_attention(
            q_TND,
            cache.key,
            cache.value,
            actual_seq_qlen=batch.actual_seq_qlen,
            actual_seq_kvlen=batch.actual_seq_kvlen,
            block_table=batch.block_table,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
            causal_mask=batch.causal_mask,
        )
        return self.output[batch.phase].partial(out_TND.flatten(1), batch)

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``[own tokens, hidden]``."""
        return self.output[batch.phase].reduce(y, batch)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.merged_qkv_proj.slots(prefix)
        yield from self.q_norm.slots(f"{prefix}.q_norm")
        yield from self.k_norm.slots(f"{prefix}.k_norm")
        yield from self.o_proj.slots(prefix)
