# SPDX-License-Identifier: Apache-2.0
"""The cases of a layer without experts: norms, rotary embedding, cache writes, attention, SwiGLU.

The calls go through ``executor.ops``, with the strides that the layers give them: q, k and v are slices of one matrix
product.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from executor.layers.rope import RotaryEmbedding
from executor.ops import attention, kv, matmul, norm, rope
from tests.npu.case import DTYPE, Case, Normal
from tests.npu.compare import equal, rounded
from tests.npu.recipes import Rank, Step


def head_norm(qkv: Tensor, gamma: Tensor, *, part: int, sizes: list[int], head_dim: int, eps: float) -> Tensor:
    return norm.rms_norm(qkv.split(sizes, -1)[part].unflatten(-1, (-1, head_dim)), gamma, eps)


def cache_write(
    k: Tensor,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    write: Callable[..., None],
    sizes: list[int],
    head_dim: int,
) -> tuple[Tensor, Tensor]:
    """k comes out of a kernel, v is a slice of the matrix product."""
    write(k, qkv.split(sizes, -1)[2].unflatten(-1, (-1, head_dim)), k_cache, v_cache, slots)
    return k_cache, v_cache


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, *, version: Callable[..., Tensor], causal: bool, **fixed
) -> Tensor:
    mask = attention.causal_mask(q.device) if causal else None
    return version(q, k_cache, v_cache, block_table=table, causal_mask=mask, **fixed)


def paged_attention_v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    block_table: Tensor,
    num_kv_heads: int,
    scale: float,
    causal_mask: Tensor | None,
) -> Tensor:
    """``attention.paged_attention`` through the first version of the operator, to tell which of the two is at fault."""
    num_blocks, block_size = k_cache.shape[:2]
    return torch.ops.npu.npu_fused_infer_attention_score(
        q,
        k_cache.view(num_blocks, block_size, -1),
        v_cache.view(num_blocks, block_size, -1),
        atten_mask=causal_mask,
        actual_seq_lengths=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        block_table=block_table,
        num_heads=q.shape[1],
        num_key_value_heads=num_kv_heads,
        scale=scale,
        input_layout=attention.LAYOUT_TND,
        sparse_mode=attention.SPARSE_FULL if causal_mask is None else attention.SPARSE_RIGHT_DOWN_CAUSAL,
        block_size=block_size,
    )[0]


def swiglu_case(rank: Rank, step: Step, what: str, rows: int, width: int) -> Case:
    given = (Normal((rows, 2 * width)),)
    return Case(rank.recipe, f"swiglu of {what}", step.name, partial(matmul.swiglu), given, (rounded,))


def norm_cases(rank: Rank, step: Step) -> Iterator[Case]:
    layer = rank.model.layers[0]
    width, eps = layer.input_layernorm.weight.shape[0], layer.input_layernorm.eps
    x, gamma = Normal((step.tokens, width)), Normal((width,), 0.3, 1.0)
    for call, given, outputs in (
        (norm.rms_norm, (x, gamma), 1),
        (norm.add_rms_norm, (x, x, gamma), 2),
        (norm.add_rms_norm_cast, (x, x, gamma), 3),
    ):
        yield Case(rank.recipe, call.__name__, step.name, partial(call, eps=eps), given, (rounded,) * outputs)


def attention_cases(rank: Rank, step: Step) -> Iterator[Case]:
    """From q, k and v behind each other to the output of attention."""
    layer, batch, plan = rank.model.layers[0].self_attn, step.batch, rank.plan
    tokens, dim, sizes = step.tokens, layer.head_dim, layer.merged_qkv_proj.sizes
    qkv, gamma = Normal((tokens, sum(sizes))), Normal((dim,), 0.3, 1.0)
    for part, module in enumerate((layer.q_norm, layer.k_norm)):
        call = partial(head_norm, part=part, sizes=sizes, head_dim=dim, eps=module.eps)
        yield Case(rank.recipe, f"rms_norm of {'qk'[part]}", step.name, call, (qkv, gamma), (rounded,))

    q, k = Normal((tokens, layer.num_heads, dim)), Normal((tokens, layer.num_kv_heads, dim))
    table = RotaryEmbedding(plan.config.rope, dim, int(batch.positions.max()) + 1, DTYPE, torch.device("cpu"))
    for call in (rope.rotary, rope.rotary_fused):
        given = (q, k, *table(batch.positions))
        yield Case(rank.recipe, call.__name__, step.name, partial(call), given, (rounded, rounded))

    cache = Normal((step.num_blocks, plan.block_size, layer.num_kv_heads, dim))
    for write in (kv.write_kv, kv.write_kv_unfused):
        call = partial(cache_write, write=write, sizes=sizes, head_dim=dim)
        given = (k, qkv, cache, cache, batch.slot_mapping)
        yield Case(rank.recipe, write.__name__, step.name, call, given, (equal, equal))
    yield from paged_cases(rank, step)


def paged_cases(rank: Rank, step: Step) -> Iterator[Case]:
    layer, batch = rank.model.layers[0].self_attn, step.batch
    cache = Normal((step.num_blocks, rank.plan.block_size, layer.num_kv_heads, layer.head_dim))
    given = (Normal((step.tokens, layer.num_heads, layer.head_dim)), cache, cache, batch.block_table)
    for version in (attention.paged_attention, paged_attention_v1):
        call = partial(
            attend,
            version=version,
            causal=batch.causal_mask is not None,
            actual_seq_qlen=batch.actual_seq_qlen,
            actual_seq_kvlen=batch.actual_seq_kvlen,
            num_kv_heads=layer.num_kv_heads,
            scale=layer.scale,
        )
        yield Case(rank.recipe, version.__name__, step.name, call, given, (rounded,))
