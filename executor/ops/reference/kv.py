# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: how tokens are written into its slots, and how a sequence is read back from its blocks.

A slot is ``block * block_size + offset``. The same bytes have several names (L = 32 bytes / itemsize):

=========  ==================================  ==================================
format     as the writing operator sees it     as the attention operator sees it
=========  ==================================  ==================================
Norm       [Bn, bs, N, D] ("Norm")             [Bn, bs, N * D] (BnBsH, 3-D)
NZ         [Bn, N * D / L, bs, L] ("PA_NZ")    [Bn, N, D / L, bs, L] (NZ, 5-D)
per head   --                                  [Bn, N, bs, D] (BnNBsD, 4-D)
=========  ==================================  ==================================

Writing copies, so any dtype passes (fp32 and fp64: reference-only extension). The card checks neither ranges
nor duplicates; the reference raises, because both are always a bug of the caller.
"""

from typing import Any

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define("npu_scatter_nd_update_", "(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)")
define(
    "npu_scatter_pa_kv_cache",
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *,"
    " Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None,"
    ' str? cache_mode="PA_NZ") -> ()',
)
define(
    "npu_scatter_pa_kv_cache_functional",
    "(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, *,"
    " Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None,"
    ' str? cache_mode="PA_NZ") -> (Tensor, Tensor)',
)

_INDEX_DTYPES = (torch.int32, torch.int64)
_NZ_BYTES = 32  # width of one fractal row


def _as_bytes(x: Tensor) -> Tensor:
    """One-byte formats (fp8) as uint8: indexed assignment is not implemented for all of them on a CPU."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


@reference("npu_scatter_nd_update_")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``input[indices[i]] = updates[i]``, in place; returns ``input``.

    Args:
        input: any shape and dtype.
        indices: int32 or int64, at least 2-D; its last dim is the number of leading axes of ``input`` it
            indexes.
        updates: ``indices.shape[:-1] + input.shape[indices.shape[-1]:]``, in the dtype of ``input``.

    Raises:
        ValueError: a shape or dtype that does not fit, or an index out of range.
    """
    op = "npu_scatter_nd_update_"
    axes = indices.shape[-1] if indices.dim() >= 2 else 0
    if indices.dtype not in _INDEX_DTYPES or not 1 <= axes <= input.dim():
        raise ValueError(
            f"{op}: indices must be int32 or int64, at least 2-D, its last dim at most {input.dim()};"
            f" got {indices.dtype} {tuple(indices.shape)}"
        )
    expected = (*indices.shape[:-1], *input.shape[axes:])
    if tuple(updates.shape) != expected or updates.dtype != input.dtype:
        raise ValueError(f"{op}: updates must be {input.dtype} {expected}, got {updates.dtype} {tuple(updates.shape)}")
    limits = torch.tensor(input.shape[:axes])
    if bool(((indices < 0) | (indices >= limits)).any()):
        raise ValueError(f"{op}: an index is outside {tuple(input.shape[:axes])}")
    _as_bytes(input)[indices.long().unbind(-1)] = _as_bytes(updates)
    return input


def _check_cache(op: str, mode: str, name: str, x: Tensor, cache: Tensor) -> int:
    """Raise unless tokens ``x`` [T, N, D] fit ``cache``; return its block size."""
    if x.dim() != 3 or cache.dim() != 4 or x.dtype != cache.dtype:
        raise ValueError(
            f"{op}: {name} must be [T, N, D] in the dtype of its 4-D cache, got {x.dtype} {tuple(x.shape)}"
            f" and {cache.dtype} {tuple(cache.shape)}"
        )
    _, heads, dim = x.shape
    row = _NZ_BYTES // x.element_size()
    if mode == "Norm":
        fits, expected, axis = cache.shape[2:] == (heads, dim), f"[Bn, bs, {heads}, {dim}]", 1
    else:
        fits = heads * dim % row == 0 and (cache.shape[1], cache.shape[3]) == (heads * dim // row, row)
        expected, axis = f"[Bn, {heads * dim / row:g}, bs, {row}]", 2
    if not fits:
        raise ValueError(f"{op}: the {name} cache must be {expected} for {mode!r}, got {tuple(cache.shape)}")
    return cache.shape[axis]


def _live_slots(op: str, slots: Tensor, tokens: int) -> list[int]:
    """The slots as integers. Raise unless there is one per token, and no slot is named twice."""
    if slots.dtype not in _INDEX_DTYPES or slots.shape != (tokens,):
        raise ValueError(
            f"{op}: slot_mapping must be int32 or int64 [{tokens}], got {slots.dtype} {tuple(slots.shape)}"
        )
    named: list[int] = slots.tolist()
    live = [slot for slot in named if slot >= 0]
    if len(set(live)) != len(live):
        raise ValueError(f"{op}: slot_mapping names a slot twice; which token wins is undefined on the card")
    return named


def _scatter(op: str, mode: str, name: str, x: Tensor, cache: Tensor, slots: list[int]) -> None:
    size = _check_cache(op, mode, name, x, cache)
    if slots and max(slots) >= cache.shape[0] * size:
        raise ValueError(f"{op}: slot {max(slots)} is outside the {name} cache, {cache.shape[0]} x {size} slots")
    if slots and min(slots) < 0:
        x = x[torch.tensor(slots) >= 0]
        slots = [slot for slot in slots if slot >= 0]
    block = torch.tensor([slot // size for slot in slots], dtype=torch.int64)
    offset = torch.tensor([slot % size for slot in slots], dtype=torch.int64)
    if mode == "Norm":
        _as_bytes(cache)[block, offset] = _as_bytes(x)
    else:
        _as_bytes(cache)[block, :, offset] = _as_bytes(x.reshape(x.shape[0], cache.shape[1], cache.shape[3]))


@reference("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write the keys and values of T tokens into their slots, in place.

    Args:
        key, value: [T, N, D] (the two D may differ), in the dtype of their caches.
        key_cache, value_cache: the "Norm" or "PA_NZ" shape of the table on top of this file.
        slot_mapping: int32 or int64 [T], unique. A negative slot is skipped, as the vendor's golden script
            does; the vendor's page forbids it.
        cache_mode: "PA_NZ" (the vendor's default) or "Norm".

    Raises:
        ValueError: a shape, dtype, mode or slot that does not fit, or a slot named twice.
        NotImplementedError: one of the compression arguments is given.
    """
    op = "npu_scatter_pa_kv_cache"
    compression = {
        "compress_lens": compress_lens,
        "compress_seq_offsets": compress_seq_offsets,
        "seq_lens": seq_lens,
    }
    for name, argument in compression.items():
        if argument is not None:
            raise NotImplementedError(f"{op}: {name} is not served by the reference kernel; leave it out")
    mode = "PA_NZ" if cache_mode is None else cache_mode
    if mode not in ("Norm", "PA_NZ"):
        raise ValueError(f"{op}: cache_mode {cache_mode!r} is neither 'Norm' nor 'PA_NZ'")
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"{op}: {key.shape[0]} keys, but {value.shape[0]} values")
    slots = _live_slots(op, slot_mapping, key.shape[0])
    _scatter(op, mode, "key", key, key_cache, slots)
    _scatter(op, mode, "value", value, value_cache, slots)


@reference("npu_scatter_pa_kv_cache_functional")
def npu_scatter_pa_kv_cache_functional(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``npu_scatter_pa_kv_cache`` on copies: returns (key_cache, value_cache), inputs untouched."""
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, **options)
    return key_cache, value_cache


def paged_block_size(op: str, name: str, cache: Tensor, kv_heads: int, head_dim: int | None) -> int:
    """Tell the attention-side format of ``cache`` by its rank, and return its block size.

    ``head_dim`` None accepts any. Raises ValueError when the heads do not fit, which catches the two layouts
    that pass on the card and read garbage: [Bn, bs, N, D] taken for BnNBsD, and the 4-D "PA_NZ" form not
    viewed as 5-D.
    """
    shape = tuple(cache.shape)
    if len(shape) == 3:
        # the limit is the vendor's for this format
        fits = shape[2] % kv_heads == 0 and head_dim in (None, shape[2] // kv_heads) and shape[2] <= 65535
        size, expected = shape[1], f"[Bn, bs, {kv_heads} * D] with {kv_heads} * D <= 65535"
    elif len(shape) == 4:
        fits = shape[1] == kv_heads and head_dim in (None, shape[3])
        size, expected = shape[2], f"[Bn, {kv_heads}, bs, D]"
    elif len(shape) == 5:
        row = _NZ_BYTES // cache.element_size()
        fits = shape[1] == kv_heads and shape[4] == row and head_dim in (None, shape[2] * row)
        size, expected = shape[3], f"[Bn, {kv_heads}, D / {row}, bs, {row}]"
    else:
        raise ValueError(f"{op}: a paged {name} has 3, 4 or 5 dims, got {shape}")
    if not fits:
        dim = "" if head_dim is None else f" with D = {head_dim}"
        raise ValueError(f"{op}: the paged {name} must be {expected}{dim}, got {shape}")
    return size


def read_paged(cache: Tensor, blocks: list[int], length: int, kv_heads: int) -> Tensor:
    """The first ``length`` tokens held by ``blocks`` of ``cache``, as [length, kv_heads, D].

    Blocks that lie behind each other are read in place, others are copied; nothing beyond ``length`` is returned.
    """
    first = blocks[0] if blocks else 0
    if blocks == list(range(first, first + len(blocks))):
        picked = cache[first : first + len(blocks)]
    else:
        picked = cache.index_select(0, torch.tensor(blocks))
    if picked.dim() == 3:
        tokens = picked.unflatten(2, (kv_heads, -1))
    elif picked.dim() == 4:
        tokens = picked.transpose(1, 2)
    else:
        tokens = picked.permute(0, 3, 1, 2, 4).flatten(3)
    return tokens.flatten(0, 1)[:length]


@meta("npu_scatter_nd_update_")
def _scatter_nd_update_meta(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input


@meta("npu_scatter_pa_kv_cache")
def _scatter_pa_kv_cache_meta(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    return None


@meta("npu_scatter_pa_kv_cache_functional")
def _scatter_pa_kv_cache_functional_meta(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(key_cache), torch.empty_like(value_cache)
