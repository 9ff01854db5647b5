# SPDX-License-Identifier: Apache-2.0
"""Fused attention, the vendor's FIA operator in both its versions: a call is cut into sequences.

Where a sequence's tokens live is in ``attention_layouts.py``, what is computed for it in
``masked_attention.py``, the formats of a paged cache in ``kv.py``. The default scale is 1.0, as the vendor's.
"""

from typing import Any

import torch
from torch import Tensor

from executor.ops.reference.attention_layouts import Arguments, as_BSND, check, kv_reader, query_places
from executor.ops.reference.masked_attention import attend, visibilities
from executor.ops.schemas import SCHEMAS, define, define_for_graphs, meta, reference

_V1, _V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
_IGNORED = ("pre_tokens", "next_tokens")  # only sparse_mode 4 reads them
_FIX_BLIND_ROWS = 2  # bit 1 of inner_precise: a query that sees no key yields zeros
# our field -> the vendor's argument
_NAMES_SHARED = {
    "mask": "atten_mask",
    "block_table": "block_table",
    "layout": "input_layout",
    "num_kv_heads": "num_key_value_heads",
    "sparse_mode": "sparse_mode",
    "inner_precise": "inner_precise",
    "block_size": "block_size",
}
_NAMES_V1 = _NAMES_SHARED | {
    "q_lengths": "actual_seq_lengths",
    "kv_lengths": "actual_seq_lengths_kv",
    "heads": "num_heads",
    "scale": "scale",
    "with_lse": "softmax_lse_flag",
}
_NAMES_V2 = _NAMES_SHARED | {
    "q_lengths": "actual_seq_qlen",
    "kv_lengths": "actual_seq_kvlen",
    "heads": "num_query_heads",
    "scale": "softmax_scale",
    "with_lse": "return_softmax_lse",
}

define(
    "npu_fused_infer_attention_score",
    "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None,"
    " SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None,"
    " Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None,"
    " Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None,"
    " Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None,"
    " Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? block_table=None,"
    " Tensor? query_padding_size=None,"
    " Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None,"
    " SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None,"
    " Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., int pre_tokens=2147483647,"
    ' int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0,'
    " int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0,"
    " int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
)
define(
    "npu_fused_infer_attention_score_v2",
    "(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, Tensor? key_rope=None,"
    " Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None,"
    " SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None,"
    " Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None,"
    " Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None,"
    " Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None,"
    " int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1., int pre_tokens=2147483647,"
    ' int next_tokens=2147483647, str input_layout="BSH", int sparse_mode=0, int block_size=0,'
    " int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0,"
    " bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None,"
    " int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None,"
    " int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None,"
    " int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None,"
    " int? dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)",
)


def _outputs(call: Arguments, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs: attention in the query's layout, and the LSE ((0,) when it is not asked for)."""
    if call.block_table is not None:
        dv = (value.shape[2] // call.kv_heads, value.shape[-1], value.shape[2] * value.shape[-1])[value.dim() - 3]
    else:
        dv = value.shape[2] // call.kv_heads if call.layout == "BSH" else value.shape[-1]
    last = call.heads * dv if call.layout == "BSH" else dv
    out = query.new_empty((*query.shape[:-1], last))
    if call.layout == "TND":
        shape: tuple[int, ...] = (query.shape[0], call.heads, 1)
    else:
        tokens = query.shape[2] if call.layout == "BNSD" else query.shape[1]
        shape = (query.shape[0], call.heads, tokens, 1)
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty(shape if call.with_lse else (0,), dtype=work)


def _fused_attention(call: Arguments, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attend in each sequence, and put the results where the layout wants them."""
    check(call, query, key, value)
    out, lse = _outputs(call, query, value)
    # tokens that belong to no sequence are undefined on the card: NaN shows whoever reads them
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    query, out_view = as_BSND(query, call.layout, call.heads), as_BSND(out, call.layout, call.heads)
    lse_view = lse.squeeze(-1).transpose(-1, -2) if lse.dim() == 4 else lse.squeeze(-1)  # [B, S, N] or [T, N]
    q_lengths, places = query_places(call, query)
    kv_lengths, read_kv = kv_reader(call, key, value, len(places), query.shape[-1])
    seen = visibilities(call.op, call.sparse_mode, call.mask, call.layout, q_lengths, kv_lengths)
    blind = 0.0 if call.inner_precise & _FIX_BLIND_ROWS else torch.nan
    for b, place in enumerate(places):
        result, log_sum = attend(query[place], *read_kv(b), call.scale, seen[b], blind, call.with_lse)
        out_view[place] = result
        if log_sum is not None:
            lse_view[place] = log_sum
    return out, lse


def _arguments(op: str, names: dict[str, str], given: dict[str, Any]) -> Arguments:
    """Sort the keyword arguments of either version; refuse those that ask for more than plain attention."""
    fields = {field: given.pop(name) for field, name in names.items() if name in given}
    for name, value in given.items():
        at_default = value is None or (name.endswith("_mode") and value == 0)
        if not at_default and name not in _IGNORED:
            raise NotImplementedError(f"{op}: {name} is not served by the reference kernel; leave it out")
    return Arguments(op, names["q_lengths"], names["kv_lengths"], **fields)


@reference(_V2)
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention over contiguous or paged keys and values; returns (attention, LSE).

    Args:
        query: TND [T, Nq, D], BSH [B, S, Nq * D], BSND or BNSD, as ``input_layout`` says; fp16 or bf16 (fp32,
            fp64: extension).
        key, value: without a ``block_table`` in the query's layout with Nk heads; with it a paged cache, its
            format told by its rank: BnBsH 3-D, BnNBsD 4-D, NZ 5-D. The query's dtype.
        options: those of the schema. ``atten_mask`` is True where a key is masked out. ``pre_tokens`` and
            ``next_tokens`` are ignored, as in the modes served (``sparse_mode`` 0, 2, 3) on the card.

    Returns:
        The attention in the query's layout and dtype, and the fp32 LSE [T, Nq, 1] or [B, Nq, S, 1] (fp64 for
        fp64). Without ``return_softmax_lse`` the LSE has shape (0,), as in the vendor's Meta kernel.
        Query tokens beyond the given lengths, and queries that see no key, are NaN: the card leaves them
            undefined.
        With bit 1 of ``inner_precise`` a query that sees no key yields zeros (and -inf in the LSE).

    Raises:
        ValueError: a shape, length, block table or mask that does not fit.
        NotImplementedError: an argument, layout, mode or dtype pair beyond plain attention.
    """
    return _fused_attention(_arguments(_V2, _NAMES_V2, options), query, key, value)


@reference(_V1)
def npu_fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The older spelling of ``npu_fused_infer_attention_score_v2``: the same, with other argument names."""
    return _fused_attention(_arguments(_V1, _NAMES_V1, options), query, key, value)


@meta(_V2)
def _v2_meta(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _outputs(_arguments(_V2, _NAMES_V2, options), query, value)


@meta(_V1)
def _v1_meta(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _outputs(_arguments(_V1, _NAMES_V1, options), query, value)


def _lengths_read(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    lengths = {name: options[name].tolist() for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    return npu_fused_infer_attention_score_v2(query, key, value, **(options | lengths))


define_for_graphs(_V2, SCHEMAS[_V2].replace("SymInt[]?", "Tensor?"), _lengths_read, _v2_meta)
