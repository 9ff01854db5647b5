# SPDX-License-Identifier: Apache-2.0
"""Reference kernel of npu_moe_finalize_routing: each token's weighted sum of its experts' rows.

Accumulated in fp32 (fp64 rows in fp64, a reference-only extension), cast once.
Shape letters: T tokens, K copies per token, H hidden size, E experts, C expert capacity, R expanded rows.
"""

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define(
    "npu_moe_finalize_routing",
    "(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? scales,"
    " Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1)"
    " -> Tensor",
)

# drop_pad_mode: which numbering of the copies, and whether the rows are [E, C, H]
_COLUMN_FAMILY, _CAPACITY_FORM = (0, 1), (1, 3)


@reference("npu_moe_finalize_routing")
def finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """``out[i] = skip1[i] + skip2[i] + sum_j scales[i, j] * (rows[p(i, j)] + bias[expert(i, j)])``.

    Rows ``[R, H]`` (modes 0 and 2) or ``[E, C, H]`` (1 and 3); ``scales`` and ``export_for_source_row``
    ``[T, K]``; ``bias [E, H]``; skips ``[T, H]``. ``p(i, j)`` is ``expanded_src_to_dst_row [T*K]`` int32 at
    ``j*T + i`` (modes 0, 1) or ``i*K + j`` (2, 3). A position of -1 contributes zero, whatever the mode (the
    vendor's pages promise it for 1 and 3 only; its golden and recipes use it with 2). Without ``scales`` each
    weight is 1 and ``k`` is K. Returns ``[T, H]`` in the rows' dtype. RuntimeError for arguments that do not
    go together.
    """
    rows, position = expanded_permuted_rows, expanded_src_to_dst_row
    tokens, top_k = _check(rows, skip1, skip2, bias, scales, position, export_for_source_row, drop_pad_mode, k)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    position_TK = position.view(top_k, tokens).t() if drop_pad_mode in _COLUMN_FAMILY else position.view(tokens, top_k)
    dropped_TK = position_TK < 0
    any_dropped = bool(dropped_TK.any())
    copies_TKH = rows.reshape(-1, rows.shape[-1])[position_TK.clamp_min(0) if any_dropped else position_TK].to(wide)
    if bias is not None and export_for_source_row is not None:
        copies_TKH = copies_TKH + bias.to(wide)[export_for_source_row]
    if any_dropped:
        # a masked fill and not a zero weight: the row it points at may be NaN
        copies_TKH = copies_TKH.masked_fill(dropped_TK.unsqueeze(-1), 0.0)
    if scales is not None:
        copies_TKH = copies_TKH * scales.to(wide).unsqueeze(-1)
    out_TH = copies_TKH.sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            out_TH = out_TH + skip.to(wide)
    return out_TH.to(rows.dtype)


@meta("npu_moe_finalize_routing")
def finalize_routing_meta(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    rows, position = expanded_permuted_rows, expanded_src_to_dst_row
    tokens, _ = _check(rows, skip1, skip2, bias, scales, position, export_for_source_row, drop_pad_mode, k)
    return rows.new_empty(tokens, rows.shape[-1])


def _check(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    position: Tensor,
    experts: Tensor | None,
    drop_pad_mode: int | None,
    k: int | None,
) -> tuple[int, int]:
    """Refuse arguments that do not go together; return (T, K)."""
    name = "npu_moe_finalize_routing"
    torch._check(drop_pad_mode in (0, 1, 2, 3), lambda: f"{name}: drop_pad_mode must be 0..3, not {drop_pad_mode}")
    torch._check(
        rows.dim() == (3 if drop_pad_mode in _CAPACITY_FORM else 2),
        lambda: (
            f"{name}: rows {tuple(rows.shape)} with drop_pad_mode {drop_pad_mode}: modes 1 and 3"
            " take (E, C, H), 0 and 2 (R, H)"
        ),
    )
    torch._check(skip2 is None or skip1 is not None, lambda: f"{name}: skip2 needs skip1")
    torch._check(bias is None or experts is not None, lambda: f"{name}: bias needs export_for_source_row")
    top_k = scales.shape[1] if scales is not None else k or 1
    tokens = scales.shape[0] if scales is not None else position.numel() // top_k
    torch._check(
        position.numel() == tokens * top_k,
        lambda: f"{name}: expanded_src_to_dst_row has {position.numel()} entries, not T*K = {tokens}*{top_k}",
    )
    for skip in (skip1, skip2):
        torch._check(
            skip is None or skip.shape == (tokens, rows.shape[-1]),
            lambda: f"{name}: skip1 and skip2 must be ({tokens}, {rows.shape[-1]})",
        )
    return tokens, top_k
