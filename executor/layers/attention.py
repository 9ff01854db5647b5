# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over the paged cache, with Qwen3's per-head normalisation of queries and keys.

Shapes: T tokens of the step, N query heads and M key/value heads of this rank, D head size.
"""

from collections.abc import Iterator

import torch
from torch import nn

from executor.batch import Batch
from executor.kv_cache import LayerCache
from executor.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from executor.layers.norm import RMSNorm
from executor.model_config import ModelConfig
from executor.ops.attention import paged_attention
from executor.ops.kv import write_kv
from executor.ops.rope import rotary
from executor.parallel.groups import Group
from executor.parallel.layout import shard, shard_kv_heads
from executor.quant.scheme import LinearScheme
from executor.storage import Storage
from executor.weights import Slot


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, group: Group, storage: Storage, scheme: LinearScheme) -> None:
        super().__init__()
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
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, storage)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, storage)
        self.o_proj = RowParallelLinear(
            part("o_proj", config.num_attention_heads, heads),
            config.hidden_size,
            bias=config.attention_bias,
            group=group,
            storage=storage,
            scheme=scheme,
        )

    def partial(
        self, x: torch.Tensor, rotary_table: tuple[torch.Tensor, torch.Tensor], batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, this rank's heads' share of the sum. Writes this step's keys and values."""
        q, k, v = self.merged_qkv_proj(x).split(self.merged_qkv_proj.sizes, dim=-1)
        q_TND = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k_TMD = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v_TMD = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        q_TND, k_TMD = rotary(q_TND, k_TMD, *rotary_table)
        write_kv(k_TMD, v_TMD, cache.key, cache.value, batch.slot_mapping)
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
        return self.o_proj.partial(out_TND.flatten(1))

    def reduce(self, y: torch.Tensor) -> torch.Tensor:
        return self.o_proj.reduce(y)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.merged_qkv_proj.slots(prefix)
        yield from self.q_norm.slots(f"{prefix}.q_norm")
        yield from self.k_norm.slots(f"{prefix}.k_norm")
        yield from self.o_proj.slots(prefix)
