# SPDX-License-Identifier: Apache-2.0
"""What one step of the model works on.

Tokens of all sequences lie behind each other, without padding between them ("TND" in the vendor's words). A step has
one of two phases. *Prefill*: at least one sequence has a chunk of its prompt in it; other sequences may add their one
decode token. *Decode*: rows of one token each, as many as one of a few buckets has, so that few graphs serve all steps;
rows without a request ("dead" rows) read and write scratch blocks of the cache and their results are dropped.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """T tokens of B sequences.

    Attributes:
        input_ids: ``[T]`` int64; inside the model only those of the rank's own tokens (``parallel.layout``).
        active: bool beside each input id, false for rows without a request and for padding; the true ones come first.
        positions: ``[T]`` int64, position of each token in its sequence.
        slot_mapping: ``[T]`` int32, where in the cache a token's key and value go (block * block_size + offset).
        block_table: ``[B, max_blocks]`` int32, the cache blocks of each sequence in order.
        actual_seq_qlen: B cumulative ends of the sequences' rows in T; the last one is T. Integers of the host, or,
            in a compiled step that reads them from its inputs, an int64 tensor.
        actual_seq_kvlen: B numbers of cached tokens to attend to, this step's own included (not cumulative); also
            either.
        logit_rows: ``[R]`` int64, R >= B: the last row of each sequence in T; its logits are computed. Repetitions
            fill up to as many rows as other attention groups have.
        most_tokens: T of the attention group that has most in this step; only read where tokens are sharded.
        causal_mask: the compressed mask in prefill, None in decode, where a row sees all that is cached.
    """

    phase: Phase
    input_ids: torch.Tensor
    active: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    actual_seq_qlen: list[int] | torch.Tensor
    actual_seq_kvlen: list[int] | torch.Tensor
    logit_rows: torch.Tensor
    most_tokens: int
    causal_mask: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True)
class Span:
    """One sequence's part of a step: ``ids`` at positions ``start ...``, in cache ``blocks``."""

    ids: list[int]
    start: int
    blocks: list[int]


def dead_span(row: int, block_size: int) -> Span:
    """A decode row without a request: token 0 at a scratch slot of its own. Never the first slot of a block: like any
    other decode row it then has two tokens to attend to, and a compiler that keeps lengths as symbols makes 1 a
    constant."""
    block, offset = divmod(row, block_size - 1)
    return Span([0], offset + 1, [block])


def build_batch(
    phase: Phase,
    spans: list[Span],
    *,
    block_size: int,
    max_blocks: int,
    causal_mask: torch.Tensor | None,
    num_active: int | None = None,
    most_tokens: int | None = None,
    num_rows: int | None = None,
) -> Batch:
    """Lay ``spans`` behind each other. Tensors are made on the host; the runner moves them to its device. A decode step
    passes ``causal_mask=None``.

    Args:
        num_active: spans that belong to requests, the first ones; None: all.
        most_tokens, num_rows: what all attention groups agreed on; None: as many as there are.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    qlen: list[int] = []
    table = torch.zeros(len(spans), max_blocks, dtype=torch.int32)
    for i, span in enumerate(spans):
        where = range(span.start, span.start + len(span.ids))
        ids += span.ids
        positions += where
        slots += [span.blocks[p // block_size] * block_size + p % block_size for p in where]
        table[i, : len(span.blocks)] = torch.tensor(span.blocks, dtype=torch.int32)
        qlen.append(len(ids))
    live = len(spans) if num_active is None else num_active
    rows = torch.tensor(qlen, dtype=torch.int64) - 1
    return Batch(
        phase=phase,
        input_ids=torch.tensor(ids, dtype=torch.int64),
        active=torch.arange(len(ids)) < (qlen[live - 1] if live else 0),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        block_table=table,
        actual_seq_qlen=qlen,
        actual_seq_kvlen=[span.start + len(span.ids) for span in spans],
        logit_rows=torch.cat((rows, rows[:1].expand((num_rows or len(spans)) - len(spans)))),
        most_tokens=most_tokens or len(ids),
        causal_mask=causal_mask,
    )
