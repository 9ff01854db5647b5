# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence, and the rules that say which keys each of its queries sees.

Queries that share a KV head are stacked, so K and V are never repeated for GQA.

Numerics: scores, softmax and the product with V in fp32, one cast at the end (fp16 and bf16 inputs). The card
keeps an fp32 softmax too; how it rounds the probabilities before the second product is not documented.
Reference-only extension: fp32 inputs, and fp64 computed in fp64.

Sq, Skv: query and KV tokens of one sequence.  Nq, Nk: query and KV heads.  D, Dv: head dims of K and V.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FULL, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL = 0, 2, 3  # the values of sparse_mode that are served
COMPRESSED_SIDE = 2048  # of the causal mask, whatever the lengths
# queries per step: bounds the scores to 128 * Nq * Skv elements, and skips keys that no row of the step sees
_QUERY_ROWS = 128
_KEY_TILE = 512  # keys in fp32 at a time


class Visibility(NamedTuple):
    """What query i of a sequence sees: keys j <= i + ``diagonal``; or those False in ``mask``; or all."""

    diagonal: int | None = None
    mask: Tensor | None = None  # bool [Sq, Skv]

    def hidden(self, rows: slice, seen: int) -> Tensor | None:
        """True where a query of ``rows`` does not see one of the first ``seen`` keys; None if all see all."""
        if self.mask is not None:
            return self.mask[rows, :seen]
        if self.diagonal is None:
            return None
        last_seen = torch.arange(rows.start, rows.stop) + self.diagonal
        return torch.arange(seen) > last_seen.unsqueeze(1)


def _scores(query_NRD: Tensor, key_SND: Tensor) -> Tensor:
    """[N, R, S] in the query's dtype. Keys are converted a tile at a time: it is used while still in cache."""
    if key_SND.shape[0] == 0:
        return query_NRD.new_empty(*query_NRD.shape[:2], 0)
    tiles = (tile.to(query_NRD.dtype).permute(1, 2, 0) for tile in key_SND.split(_KEY_TILE))
    return torch.cat([torch.bmm(query_NRD, tile) for tile in tiles], dim=-1)


def _mix(weights_NRS: Tensor, value_SND: Tensor) -> Tensor:
    """[N, R, D] in the weights' dtype: the values weighted by the probabilities, tile by tile."""
    heads, rows, _ = weights_NRS.shape
    total = weights_NRS.new_zeros(heads, rows, value_SND.shape[-1])
    for weights, tile in zip(weights_NRS.split(_KEY_TILE, dim=-1), value_SND.split(_KEY_TILE)):
        total.baddbmm_(weights, tile.to(total.dtype).transpose(0, 1))
    return total


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visibility: Visibility,
    blind: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one sequence.

    Args:
        query: [Sq, Nq, D].
        key: [Skv, Nk, D], Nk a divisor of Nq; query head h reads KV head ``h // (Nq / Nk)``.
        value: [Skv, Nk, Dv].
        blind: the output of a query that sees no key; its LSE is -inf + ``blind``.

    Returns:
        out [Sq, Nq, Dv] in the query's dtype, and the log of the sum of exponentials [Sq, Nq] in fp32 (fp64
        for fp64), None without ``with_lse``.
    """
    (sq, heads, _), (length, kv_heads, dv) = query.shape, value.shape
    group = heads // kv_heads
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(sq, heads, dv)
    lse = query.new_empty(sq, heads, dtype=work) if with_lse else None
    for start in range(0, sq, _QUERY_ROWS):
        rows = slice(start, min(start + _QUERY_ROWS, sq))
        n = rows.stop - rows.start
        diagonal = visibility.diagonal
        seen = length if diagonal is None else max(0, min(length, rows.stop + diagonal))
        stacked = (query[rows].to(work) * scale).unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = _scores(stacked, key[:seen]).unflatten(1, (group, n))  # [Nk, group, n, seen]
        hidden = visibility.hidden(rows, seen)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        result = _mix(scores.softmax(-1).flatten(1, 2), value[:seen]).unflatten(1, (group, n))
        out[rows] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[rows] = scores.logsumexp(-1).permute(2, 0, 1).flatten(1, 2)
        if seen == 0 or hidden is not None:
            sees_nothing = torch.ones(n, dtype=torch.bool) if hidden is None else hidden.all(-1)
            out[rows][sees_nothing] = blind
            if lse is not None:
                lse[rows][sees_nothing] += blind
    return out, lse


def check_compressed_mask(op: str, sparse_mode: int, mask: Tensor | None) -> None:
    """Raise ValueError unless ``mask`` can be the compressed one: True exactly on the strict upper triangle.

    Looks at a few corners only: enough to catch a missing, transposed, inverted or inclusive triangle at no
    cost.
    """
    side, last = COMPRESSED_SIDE, COMPRESSED_SIDE - 1
    if mask is None:
        raise ValueError(f"{op}: sparse_mode {sparse_mode} needs atten_mask, the compressed {side}x{side} mask")
    if mask.shape[-2:] != (side, side) or mask.numel() != side * side or not mask.is_contiguous():
        raise ValueError(
            f"{op}: sparse_mode {sparse_mode} takes a contiguous {side}x{side} mask whatever the lengths,"
            f" got {tuple(mask.shape)}"
        )
    row = torch.tensor([0, 0, 0, 1, last, last, last, last - 1])
    column = torch.tensor([0, 1, last, 0, 0, last - 1, last, last])
    if not torch.equal(mask.view(side, side)[row, column].bool(), column > row):
        raise ValueError(f"{op}: the compressed mask must be True (masked out) exactly on the strict upper triangle")


def visibilities(
    op: str,
    sparse_mode: int,
    mask: Tensor | None,
    layout: str,
    query_lengths: list[int],
    kv_lengths: list[int],
) -> list[Visibility]:
    """What each sequence of a batch sees under the vendor's ``sparse_mode`` and ``atten_mask``.

    Modes: 0, the full mask if there is one; 2, keys j <= i; 3, keys j <= i + Skv - Sq. With one query token
    per sequence the causal modes have no effect, as documented: every key is seen (which for mode 3 is what
    its rule says anyway). A full mask is (1, Sq, Skv), (B, 1, Sq, Skv) or (1, 1, Sq, Skv) and may be larger
    than the sequences; except for TND also (B, Skv) with one query token, (Sq, Skv) with more.

    Raises:
        ValueError: the mask's dtype, shape or content does not fit.
        NotImplementedError: another mode.
    """
    if sparse_mode not in (FULL, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL):
        raise NotImplementedError(f"{op}: sparse_mode {sparse_mode} is not served by the reference kernel: 0, 2, 3 are")
    if mask is not None and mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        raise ValueError(f"{op}: atten_mask must be bool, int8 or uint8, got {mask.dtype}")
    most_queries, most_keys = max(query_lengths, default=0), max(kv_lengths, default=0)
    if sparse_mode != FULL:
        check_compressed_mask(op, sparse_mode, mask)
        if most_queries <= 1:
            return [Visibility()] * len(query_lengths)
        anchored_left = sparse_mode == LEFT_UP_CAUSAL
        return [Visibility(0 if anchored_left else skv - sq) for sq, skv in zip(query_lengths, kv_lengths)]
    if mask is None:
        return [Visibility()] * len(query_lengths)
    full = mask.bool()
    if full.dim() == 2 and layout != "TND":
        full = full.unsqueeze(1 if most_queries <= 1 else 0)
    elif full.dim() == 4 and full.shape[1] == 1:
        full = full.squeeze(1)
    batch = len(query_lengths)
    if full.dim() != 3 or full.shape[0] not in (1, batch) or full.shape[1] < most_queries or full.shape[2] < most_keys:
        raise ValueError(
            f"{op}: atten_mask {tuple(mask.shape)} does not cover {batch} sequences of up to"
            f" {most_queries} queries and {most_keys} keys"
        )
    full = full.expand(batch, -1, -1)
    return [Visibility(None, full[b, :sq, :skv]) for b, (sq, skv) in enumerate(zip(query_lengths, kv_lengths))]
