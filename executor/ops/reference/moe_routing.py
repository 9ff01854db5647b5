# SPDX-License-Identifier: Apache-2.0
"""Reference kernel of npu_moe_init_routing_v2: copies of the tokens sorted by expert, the row family.

Two generations of operators number the copy (token i, slot j) differently; mixing them is silently wrong:

- column family, ``j*T + i``: npu_moe_init_routing, npu_moe_finalize_routing with drop_pad_mode 0 and 1;
- row family, ``i*K + j``: npu_moe_init_routing_v2, npu_moe_finalize_routing with drop_pad_mode 2 and 3.

What a device leaves uninitialised is poisoned: NaN in floating outputs, -1 in integer ones.
Shape letters: T tokens, K copies per token, H hidden size, E experts, C expert capacity.
"""

import math

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define(
    "npu_moe_init_routing_v2",
    "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1,"
    " int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,"
    " bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[],"
    " int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
)

# expert_tokens_num_type and row_idx_type
_CUMULATIVE, _COUNTS, _PAIRS = 0, 1, 2
_SRC_TO_DST = 0

_Quad = tuple[Tensor, Tensor, Tensor, Tensor]


@reference("npu_moe_init_routing_v2")
def init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> _Quad:
    """Row family, unquantised. ``x [T, H]``, ``expert_idx [T, K]`` int32, ``scale [T]`` fp32 or None.

    Only copies for experts in ``[start, end) = active_expert_range`` (empty: all) are placed; ids outside
    ``[0, E)`` are nobody's. Returns:

    - ``expanded_x``: x in expert order, ``[T*K, H]`` or ``active_num`` rows if 0 < active_num < T*K, NaN past
      the placed copies; with ``drop_pad_mode=1`` ``[E, C, H]``, each expert's first C copies, zeros after
      them;
    - ``expanded_row_idx [T*K]`` int32: position of each flat copy, -1 if not placed (``row_idx_type=0``), or
      flat copy at each position, -1 past the placed ones (1);
    - ``expert_tokens`` int64: cumulative (type 0) or counts (1) of the range ``[end - start]``, counted
      before capacity drops; or (2) ``[E, 2]`` pairs (expert id, count) of the busy experts, ended by zeros.
      Shape ``()``, and no contents, without the flag;
    - ``expanded_scale`` fp32, one per row of expanded_x: the copied ``scale``, or no contents.

    RuntimeError for shapes and ranges the vendor refuses, NotImplementedError for quant_mode other than -1.
    """
    start, end = _check_init_routing_v2(
        x, expert_idx, scale, expert_capacity, expert_num, drop_pad_mode, expert_tokens_num_type,
        expert_tokens_num_flag, quant_mode, active_expert_range, row_idx_type,
    )  # fmt: skip
    top_k, span = expert_idx.shape[1], end - start
    local = expert_idx.reshape(-1) - start
    local = torch.where(local < 0, span, local).clamp_max(span)  # everybody else's copies sort to the end
    sorted_local, order = local.sort(stable=True)
    histogram = torch.bincount(local, minlength=span + 1)
    counts, placed = histogram[:span], order.numel() - int(histogram[span])
    if expert_tokens_num_flag:
        expert_tokens = _expert_tokens(counts, expert_tokens_num_type, start, expert_num)
    else:
        expert_tokens = counts.new_full((), -1)

    if drop_pad_mode == 1:
        kept, cell = _capacity_cells(sorted_local[:placed], counts, expert_capacity)
        source, rows, rest = order[:placed][kept], expert_num * expert_capacity, 0.0
        row_idx = torch.full_like(order, -1, dtype=torch.int32)
        row_idx[source] = cell.to(torch.int32)
        expanded_x = _place(x, source // top_k, cell, rows, rest).view(expert_num, expert_capacity, -1)
    else:
        if row_idx_type == _SRC_TO_DST:
            row_idx = _positions(order, placed)
        else:
            row_idx = order.to(torch.int32)
            row_idx[placed:] = -1
        rows, rest, cell = _expanded_rows(expert_idx, active_num), math.nan, None
        source = order[: min(rows, placed)]
        expanded_x = _place(x, source // top_k, cell, rows, rest if x.is_floating_point() else -1)
    if scale is None:
        expanded_scale = torch.full((rows,), math.nan)
    else:
        expanded_scale = _place(scale.float(), source // top_k, cell, rows, rest)
    return expanded_x, row_idx, expert_tokens, expanded_scale


@meta("npu_moe_init_routing_v2")
def init_routing_v2_meta(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> _Quad:
    start, end = _check_init_routing_v2(
        x, expert_idx, scale, expert_capacity, expert_num, drop_pad_mode, expert_tokens_num_type,
        expert_tokens_num_flag, quant_mode, active_expert_range, row_idx_type,
    )  # fmt: skip
    drop_pad = drop_pad_mode == 1
    rows = expert_num * expert_capacity if drop_pad else _expanded_rows(expert_idx, active_num)
    leading = (expert_num, expert_capacity) if drop_pad else (rows,)
    tokens_shape: tuple[int, ...] = (expert_num, 2) if expert_tokens_num_type == _PAIRS else (end - start,)
    return (
        x.new_empty((*leading, x.shape[1])),
        x.new_empty(expert_idx.numel(), dtype=torch.int32),
        x.new_empty(tokens_shape if expert_tokens_num_flag else (), dtype=torch.int64),
        x.new_empty(rows, dtype=torch.float32),
    )


def _positions(order: Tensor, placed: int) -> Tensor:
    """Where each flat copy went: the inverse of ``order``, -1 for all but the first ``placed`` of it."""
    positions = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    positions[placed:] = -1
    return torch.empty_like(positions).scatter_(0, order, positions)


def _capacity_cells(sorted_local: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Which placed copies, in expert order, fit their expert's capacity, and the cell of those in [E*C]."""
    rank = torch.arange(sorted_local.numel()) - (counts.cumsum(0) - counts)[sorted_local]
    kept = rank < capacity
    return kept, (sorted_local * capacity + rank)[kept]


def _expanded_rows(expert_idx: Tensor, active_num: int) -> int:
    return min(active_num, expert_idx.numel()) if active_num > 0 else expert_idx.numel()


def _place(values: Tensor, source: Tensor, at: Tensor | None, rows: int, rest: float) -> Tensor:
    """``rows`` rows: ``values[source]`` at positions ``at`` (None: the first ones), ``rest`` elsewhere."""
    if at is None and source.numel() == rows:
        return values[source]
    out = values.new_full((rows, *values.shape[1:]), rest)
    out[slice(source.numel()) if at is None else at] = values[source]
    return out


def _expert_tokens(counts: Tensor, kind: int, start: int, expert_num: int) -> Tensor:
    if kind == _COUNTS:
        return counts
    if kind == _CUMULATIVE:
        return counts.cumsum(0)
    busy = counts.nonzero().squeeze(1)
    pairs = counts.new_zeros(expert_num, 2)  # the device writes one terminating (0, 0), not the whole tail
    pairs[: busy.numel()] = torch.stack((busy + start, counts[busy]), 1)
    return pairs


def _check_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: list[int] | tuple[int, ...],
    row_idx_type: int,
) -> tuple[int, int]:
    """Refuse what the vendor refuses and what is not computed here; return the active range."""
    name = "npu_moe_init_routing_v2"
    if quant_mode != -1:
        raise NotImplementedError(f"{name} reference: quant_mode {quant_mode}, only -1 (none)")
    torch._check(
        x.dim() == expert_idx.dim() == 2 and x.shape[0] == expert_idx.shape[0],
        lambda: f"{name}: x {tuple(x.shape)} and expert_idx {tuple(expert_idx.shape)} must be (T, H) and (T, K)",
    )
    torch._check(
        scale is None or scale.shape == x.shape[:1],
        lambda: f"{name}: scale must be ({x.shape[0]},) without quantisation",
    )
    torch._check(
        drop_pad_mode in (0, 1) and expert_tokens_num_type in (0, 1, 2) and row_idx_type in (0, 1),
        lambda: f"{name}: {drop_pad_mode=}, {expert_tokens_num_type=}, {row_idx_type=} out of range",
    )
    start, end = active_expert_range if active_expert_range else (0, expert_num)
    torch._check(
        0 <= start < end <= expert_num,
        lambda: f"{name}: active_expert_range [{start}, {end}) must be increasing and within {expert_num=}",
    )
    if drop_pad_mode == 1:
        torch._check(
            (start, end) == (0, expert_num) and 0 < expert_capacity < x.shape[0],
            lambda: (
                f"{name}: drop_pad_mode 1 needs all experts active and 0 < expert_capacity < T,"
                f" not [{start}, {end}) and {expert_capacity}"
            ),
        )
        torch._check(
            row_idx_type == _SRC_TO_DST and (not expert_tokens_num_flag or expert_tokens_num_type == _COUNTS),
            lambda: f"{name}: drop_pad_mode 1 gives counts (type 1) and row_idx_type 0 only",
        )
    return start, end
