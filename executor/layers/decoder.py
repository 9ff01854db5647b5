# SPDX-License-Identifier: Apache-2.0
"""A decoder layer as four phases, and the causal language model as a list of such layers.

The phases are what an overlap schedule interleaves; ``forward`` plays them in order. Where a layer is dense or
sparse, which groups split it and which format its weights have was all decided when it was built.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from executor.batch import Batch, Phase
from executor.kv_cache import LayerCache
from executor.layers.attention import Attention
from executor.layers.embedding import LMHead, VocabParallelEmbedding
from executor.layers.norm import RMSNorm
from executor.layers.rope import RotaryEmbedding
from executor.parallel.layout import Residual
from executor.weights import Slot

RotaryTable = tuple[torch.Tensor, torch.Tensor]


class FeedForward(Protocol):
    """What stands behind ``mlp``: a dense MLP or a mixture of experts."""

    def partial(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...

    def reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor: ...

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]: ...


class DecoderLayer(nn.Module):
    def __init__(
        self, self_attn: Attention, mlp: FeedForward, input_layernorm: RMSNorm, post_attention_layernorm: RMSNorm
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def attn_compute(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotary: RotaryTable, batch: Batch, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.partial(x, rotary, batch, cache), residual

    def attn_reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.self_attn.reduce(y, batch)

    def ffn_compute(self, y: torch.Tensor, residual: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        y, residual = self.post_attention_layernorm.add(y, residual)
        return self.mlp.partial(y, batch), residual

    def ffn_reduce(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.mlp.reduce(y, batch)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotary: RotaryTable, batch: Batch, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.attn_compute(x, residual, rotary, batch, cache)
        x, residual = self.ffn_compute(self.attn_reduce(x, batch), residual, batch)
        return self.ffn_reduce(x, batch), residual

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        yield from self.input_layernorm.slots(f"{prefix}.input_layernorm")
        yield from self.self_attn.slots(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.slots(f"{prefix}.mlp")


class CausalLM(nn.Module):
    """Token ids of a step to the logits of the rows that need a next token."""

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        lm_head: LMHead,
        rotary_emb: RotaryEmbedding,
        residual: Mapping[Phase, Residual],
        *,
        tie_word_embeddings: bool,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.rotary_emb = rotary_emb
        self.residual = residual
        self.tie_word_embeddings = tie_word_embeddings
        self.shares_head = tie_word_embeddings and lm_head.tie(embed_tokens)

    def untie(self) -> None:
        """Give the head memory of its own, to be filled from the checkpoint's ``lm_head.weight``."""
        self.tie_word_embeddings = False
        if self.shares_head:
            self.lm_head.untie()
            self.shares_head = False

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Returns ``[len(batch.logit_rows), vocab]`` in the model's dtype."""
        x, residual = self.embed_tokens(batch), None
        rotary = self.rotary_emb(batch.positions)
        for layer, cache in zip(self.layers, caches):
            x, residual = layer(x, residual, rotary, batch, cache)
        x, _ = self.norm.add(x, residual)
        return self.lm_head(self.residual[batch.phase].rows(x, batch.logit_rows), batch)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Every (checkpoint name, slot) of this rank. A tied head that has memory of its own is filled from the
        embedding's tensor; one that shares memory needs nothing."""
        yield from self.embed_tokens.slots("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from layer.slots(f"model.layers.{i}")  # type: ignore[operator]  # ModuleList forgets the type
        yield from self.norm.slots("model.norm")
        if not self.tie_word_embeddings:
            yield from self.lm_head.slots("lm_head")
        elif not self.shares_head:
            yield from self.lm_head.slots("model.embed_tokens")
