# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of each sequence live in the arguments of fused attention: layouts, lengths, block tables.

Lengths, the vendor's way: for TND the query lengths are cumulative, and so are the KV lengths *unless* the
cache is paged; every other length is per sequence. A list of one length serves all sequences; excess entries
are ignored.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.ops.reference.kv import paged_block_size, read_paged

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("TND", "BSH", "BSND", "BNSD")
Place = Any  # an index: a slice of tokens for TND, (batch, slice of tokens) otherwise


@dataclass(frozen=True)
class Arguments:
    """The arguments that both versions of the operator share, with the schema's defaults."""

    op: str
    q_lengths_name: str  # the vendor's argument, for errors
    kv_lengths_name: str
    layout: str = "BSH"
    heads: int = 1
    num_kv_heads: int = 0
    scale: float = 1.0
    sparse_mode: int = 0
    inner_precise: int = 0
    mask: Tensor | None = None
    q_lengths: Sequence[int] | None = None
    kv_lengths: Sequence[int] | None = None
    block_table: Tensor | None = None
    block_size: int = 0
    with_lse: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.heads

    def lengths(self, name: str, given: Sequence[int] | None, batch: int, limit: int) -> list[int]:
        """``batch`` lengths within 0..limit from the vendor's list; the limit itself without a list."""
        if given is None:
            return [limit] * batch
        values = list(given) * batch if len(given) == 1 else list(given)[:batch]
        if len(values) < batch:
            raise ValueError(f"{self.op}: {name} has {len(values)} lengths for {batch} sequences")
        for b, n in enumerate(values):
            if not 0 <= n <= limit:
                raise ValueError(f"{self.op}: {name}[{b}] = {n} is not within 0..{limit}")
        return values

    def ranges(self, name: str, ends: Sequence[int] | None, batch: int | None, limit: int) -> list[slice]:
        """Token ranges from running totals that never decrease and stay within ``limit``."""
        if not ends:
            raise ValueError(f"{self.op}: layout TND needs {name}, the running totals of the lengths")
        if batch is not None and len(ends) < batch:
            raise ValueError(f"{self.op}: {name} has {len(ends)} running totals for {batch} sequences")
        steps = [0, *ends[:batch]]
        if any(a > b for a, b in itertools.pairwise(steps)) or steps[-1] > limit:
            raise ValueError(
                f"{self.op}: {name} {steps[1:]} must never decrease, nor exceed the {limit} tokens there are"
            )
        return [slice(a, b) for a, b in itertools.pairwise(steps)]


def as_BSND(x: Tensor, layout: str, heads: int) -> Tensor:
    """The view [B, S, N, D] of a BSH, BSND or BNSD tensor; TND stays as it is."""
    if layout == "BSH":
        return x.unflatten(2, (heads, -1))
    return x.transpose(1, 2) if layout == "BNSD" else x


def check(call: Arguments, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless layout, dtypes, ranks and heads fit; a paged cache is checked where it is read."""
    op, layout, dtype = call.op, call.layout, query.dtype
    if layout not in LAYOUTS:
        raise NotImplementedError(f"{op}: input_layout {layout!r} is not served; the reference knows {LAYOUTS}")
    if dtype not in _DTYPES or not dtype == key.dtype == value.dtype:
        raise NotImplementedError(f"{op}: query {dtype}, key {key.dtype}, value {value.dtype}: give one float dtype")
    if call.heads % call.kv_heads or call.heads // call.kv_heads > 64:
        raise ValueError(f"{op}: {call.kv_heads} KV heads must divide {call.heads} query heads, at most 64 times")
    _check_heads(op, layout, "query", query, call.heads)
    if call.block_table is not None:
        return
    _check_heads(op, layout, "key", key, call.kv_heads)
    _check_heads(op, layout, "value", value, call.kv_heads)
    q, k, v = query, as_BSND(key, layout, call.kv_heads), as_BSND(value, layout, call.kv_heads)
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != as_BSND(q, layout, call.heads).shape[-1]:
        raise ValueError(
            f"{op}: key {tuple(key.shape)} must have the head dim of the query {tuple(q.shape)},"
            f" and as many tokens as the value {tuple(value.shape)}"
        )
    if layout != "TND" and k.shape[0] != q.shape[0]:
        raise ValueError(f"{op}: the batch of key {tuple(key.shape)} is not that of query {tuple(q.shape)}")


def _check_heads(op: str, layout: str, name: str, x: Tensor, heads: int) -> None:
    rank = 4 if len(layout) == 4 else 3
    if x.dim() == rank:
        fits = x.shape[2] % heads == 0 if layout == "BSH" else x.shape[layout.index("N")] == heads
        if fits:
            return
    raise ValueError(f"{op}: {name} {tuple(x.shape)} is not {layout} with {heads} heads")


def query_places(call: Arguments, query: Tensor) -> tuple[list[int], list[Place]]:
    """Query length of each sequence, and the index of its tokens; ``query`` is the ``as_BSND`` view."""
    if call.layout == "TND":
        ranges = call.ranges(call.q_lengths_name, call.q_lengths, None, query.shape[0])
        return [r.stop - r.start for r in ranges], list(ranges)
    batch, tokens = query.shape[:2]
    lengths = call.lengths(call.q_lengths_name, call.q_lengths, batch, tokens)
    return lengths, [(b, slice(0, n)) for b, n in enumerate(lengths)]


def kv_reader(
    call: Arguments, key: Tensor, value: Tensor, batch: int, head_dim: int
) -> tuple[list[int], Callable[[int], tuple[Tensor, Tensor]]]:
    """KV length of each sequence, and a function of its number that gives its K and V, each [Skv, Nk, D]."""
    if call.block_table is not None:
        lengths, blocks = _paged(call, key, value, batch, head_dim)

        def read(b: int) -> tuple[Tensor, Tensor]:
            return (
                read_paged(key, blocks[b], lengths[b], call.kv_heads),
                read_paged(value, blocks[b], lengths[b], call.kv_heads),
            )

        return lengths, read
    k, v = as_BSND(key, call.layout, call.kv_heads), as_BSND(value, call.layout, call.kv_heads)
    places: list[Place]
    if call.layout == "TND":
        places = list(call.ranges(call.kv_lengths_name, call.kv_lengths, batch, k.shape[0]))
        lengths = [r.stop - r.start for r in places]
    else:
        lengths = call.lengths(call.kv_lengths_name, call.kv_lengths, batch, k.shape[1])
        places = [(b, slice(0, n)) for b, n in enumerate(lengths)]
    return lengths, lambda b: (k[places[b]], v[places[b]])


def _paged(call: Arguments, key: Tensor, value: Tensor, batch: int, head_dim: int) -> tuple[list[int], list[list[int]]]:
    """KV length and block ids of each sequence."""
    op, table = call.op, call.block_table
    if table is None or table.dim() != 2 or table.shape[0] != batch or table.dtype != torch.int32:
        raise ValueError(f"{op}: block_table must be int32 [{batch}, max blocks], one row per sequence")
    size = paged_block_size(op, "key", key, call.kv_heads, head_dim)
    if not size == call.block_size == paged_block_size(op, "value", value, call.kv_heads, None):
        raise ValueError(f"{op}: block_size {call.block_size} is not that of the key and value caches, {size}")
    if call.kv_lengths is None:
        raise ValueError(f"{op}: a paged cache needs {call.kv_lengths_name}, one length per sequence")
    lengths = call.lengths(call.kv_lengths_name, call.kv_lengths, batch, table.shape[1] * size)
    blocks = [row[: -(-n // size)] for row, n in zip(table.tolist(), lengths)]
    last = min(key.shape[0], value.shape[0]) - 1
    if any(not 0 <= block <= last for row in blocks for block in row):
        raise ValueError(f"{op}: block_table names a block outside 0..{last}")
    return lengths, blocks
