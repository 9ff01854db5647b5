# SPDX-License-Identifier: Apache-2.0
"""Token embedding and language-model head, both split over the vocabulary."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from executor.batch import Batch, Phase
from executor.parallel.groups import Group
from executor.parallel.layout import Tokens, shard
from executor.quant.scheme import LinearScheme
from executor.storage import Storage
from executor.weights import Slot


class VocabParallelEmbedding(nn.Module):
    """``ids [own tokens] -> [own tokens, hidden]``. Each rank looks up its part of the vocabulary; the sum over ranks
    is the row."""

    def __init__(
        self, vocab_size: int, hidden_size: int, group: Group, tokens: Mapping[Phase, Tokens], storage: Storage
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.mine = shard(vocab_size, group, "vocab_size")
        data = torch.empty(len(self.mine), hidden_size, dtype=storage.dtype, device=storage.device)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.lookup = self._all_rows if group.size == 1 else self._my_rows

    def forward(self, batch: Batch) -> torch.Tensor:
        tokens = self.tokens[batch.phase]
        return tokens.leave(self.lookup(tokens.enter(batch.input_ids, batch)), batch)

    def _all_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)

    def _my_rows(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.mine.start
        outside = (local < 0) | (local >= len(self.mine))
        rows = nn.functional.embedding(local.masked_fill(outside, 0), self.weight)
        return rows.masked_fill(outside.unsqueeze(-1), 0)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        index = (slice(self.mine.start, self.mine.stop), slice(None))
        yield f"{name}.weight", Slot(self.weight, self.weight.data, (self.vocab_size, self.weight.shape[1]), index)


class LMHead(nn.Module):
    """``[rows, hidden] -> logits [rows, vocab]`` in the model's dtype, gathered from the ranks' parts."""

    weight: torch.Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: Group,
        tokens: Tokens,
        storage: Storage,
        scheme: LinearScheme,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.shape = (vocab_size, hidden_size)
        self.mine = shard(vocab_size, group, "vocab_size")
        self.scheme = scheme
        scheme.declare(self, hidden_size, len(self.mine), storage)

    def tie(self, embedding: VocabParallelEmbedding) -> bool:
        """Use the embedding's own memory if both are split alike; returns whether they now share it."""
        if embedding.mine != self.mine:
            return False
        del self.weight  # no parameter of its own any more: a view of the embedding's
        self.weight = embedding.weight.data.t()
        return True

    def untie(self) -> None:
        """Memory of its own again, uninitialised."""
        self.weight = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def finalize(self) -> None:
        self.scheme.finalize(self)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``x``: the rows of ``batch.logit_rows``, the same on all ranks of an attention group."""
        return self.tokens.leave_columns(self.scheme.apply(self, self.tokens.enter(x, batch), None))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        index = (slice(self.mine.start, self.mine.stop), slice(None))
        yield from self.scheme.slots(self, name, slice(None), self.shape, index)
