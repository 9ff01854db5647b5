# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache, for prefill and decode alike.

T: query tokens of all sequences.  B: sequences.  Nq, Nk: query and KV heads.  D: head dim.
"""

import torch
from torch import Tensor

LAYOUT_TND = "TND"
SPARSE_FULL = 0  # without a mask: every key below the sequence's length is seen
SPARSE_RIGHT_DOWN_CAUSAL = 3  # query i sees keys j <= i + Skv - Sq
CAUSAL_MASK_SIZE = 2048  # the compressed mask has this side whatever the lengths

_causal_masks: dict[torch.device, Tensor] = {}


def causal_mask(device: torch.device | str) -> Tensor:
    """The compressed mask of a device, bool [2048, 2048]: True (masked out) strictly above the diagonal."""
    device = torch.device(device)
    mask = _causal_masks.get(device)
    if mask is None:
        mask = torch.ones(CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE, dtype=torch.bool, device=device).triu_(1)
        if type(mask) is Tensor:  # a fake tensor must not outlive its tracing
            _causal_masks[device] = mask
    return mask


def paged_attention(
    q_TND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    actual_seq_qlen: list[int] | Tensor,
    actual_seq_kvlen: list[int] | Tensor,
    block_table: Tensor,
    num_kv_heads: int,
    scale: float,
    causal_mask: Tensor | None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its cached tokens, themselves included.

    Args:
        q_TND: [T, Nq, D], the sequences one after the other.
        k_cache, v_cache: [num_blocks, block_size, Nk, D], in the dtype of q. Flattened to three dims here,
            because the operator takes a 4-D cache for [num_blocks, Nk, block_size, D].
        actual_seq_qlen: B running totals of the query lengths; rows from the last one on are undefined (NaN
            on a CPU).
        actual_seq_kvlen: B lengths, not running totals: tokens in the cache, the newest included. Both lengths are
            integers of the host, or both are int64 tensors [B], in a compiled step that must not read them.
        block_table: int32 [B, max_blocks], the blocks of each sequence in order.
        scale: of the scores, D ** -0.5 for Qwen3 (the operator's own default is 1.0).
        causal_mask: ``causal_mask(device)``; or None for decode, one query token per sequence, where nothing
            is hidden.

    Returns:
        [T, Nq, D] in the dtype of q.

    Raises:
        ValueError: None as the mask with more than one query token in a sequence; or shapes, lengths, blocks
            that do not fit.
    """
    on_host = isinstance(actual_seq_qlen, list)
    if on_host and causal_mask is None and actual_seq_qlen[-1] != len(actual_seq_qlen):
        raise ValueError(f"paged_attention: without a causal mask each sequence has one query, not {actual_seq_qlen}")
    num_blocks, block_size = k_cache.shape[:2]
    arguments = {
        "query": q_TND,
        "key": k_cache.view(num_blocks, block_size, -1),
        "value": v_cache.view(num_blocks, block_size, -1),
        "atten_mask": causal_mask,
        "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_kvlen,
        "block_table": block_table,
        "num_query_heads": q_TND.shape[1],
        "num_key_value_heads": num_kv_heads,
        "softmax_scale": scale,
        "input_layout": LAYOUT_TND,
        "sparse_mode": SPARSE_FULL if causal_mask is None else SPARSE_RIGHT_DOWN_CAUSAL,
        "block_size": block_size,
    }
    if on_host:
        return torch.ops.npu.npu_fused_infer_attention_score_v2(**arguments)[0]
    return torch.ops.air.npu_fused_infer_attention_score_v2(**arguments)[0]  # torchair's name of the same kernel
