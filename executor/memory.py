# SPDX-License-Identifier: Apache-2.0
"""Will it fit: bytes per rank, before anything is allocated.

Weights are counted from the model itself, built on ``meta`` for this rank, so there is no second set of shape
formulas to go stale. The workspace is the largest set of activations alive at once, an estimate.
"""

from dataclasses import dataclass

from torch import nn

from executor.errors import UserError
from executor.model_config import ModelConfig
from executor.parallel.groups import Groups
from executor.parallel.layout import shard_kv_heads
from executor.platform.features import GIB, Features


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank. ``budget`` is ``mem_fraction_static`` of the device; everything below has to fit in it."""

    weights: int
    kv_block: int
    num_blocks: int
    logits: int
    workspace: int
    budget: int

    @property
    def kv_cache(self) -> int:
        return self.kv_block * self.num_blocks

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.logits + self.workspace


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers. A tied head is a view of the embedding and has none of its own."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def kv_block_bytes(config: ModelConfig, groups: Groups, block_size: int, itemsize: int) -> int:
    """Keys and values of ``block_size`` tokens in all layers of this rank."""
    heads = len(shard_kv_heads(config.num_key_value_heads, groups.attn_tp))
    return 2 * config.num_hidden_layers * block_size * heads * config.head_dim * itemsize


def workspace_bytes(config: ModelConfig, groups: Groups, tokens: int, itemsize: int) -> int:
    """Activations of the widest point of a layer in a step of ``tokens`` tokens.

    Alive together: residual and normalised hidden states, and the larger of attention (q, k, v, output) and the
    feed-forward block (dense: gate|up and its product; MoE: the K-fold expanded rows in and out, gate|up, product).
    """
    heads = config.num_attention_heads // groups.attn_tp.size + 2 * len(
        shard_kv_heads(config.num_key_value_heads, groups.attn_tp)
    )
    attention = (heads + config.num_attention_heads // groups.attn_tp.size) * config.head_dim
    ffn = (
        3 * config.intermediate_size // groups.dense_tp.size if len(config.moe_layers) < config.num_hidden_layers else 0
    )
    if config.moe is not None and config.moe_layers:
        local = config.moe.moe_intermediate_size // groups.moe_tp.size
        ffn = max(ffn, config.moe.num_experts_per_tok * (2 * config.hidden_size + 3 * local))
    return tokens * itemsize * (2 * config.hidden_size + max(attention, ffn))


def reference_workspace_bytes(config: ModelConfig, groups: Groups, tokens: int, max_positions: int) -> int:
    """float32 temporaries of the reference kernels, which a card's kernels do not have: attention scores and their
    softmax for 128 queries of a step against the longest sequence, and in a MoE layer gate|up, its product and the
    rows that are summed for each token."""
    heads = config.num_attention_heads // groups.attn_tp.size
    scores = 2 * 4 * min(tokens, 128) * heads * max_positions
    wide = 4 * tokens * 3 * config.intermediate_size // groups.dense_tp.size
    if config.moe is not None and config.moe_layers:
        local = config.moe.moe_intermediate_size // groups.moe_tp.size
        wide = max(wide, 4 * tokens * config.moe.num_experts_per_tok * (3 * local + 2 * config.hidden_size))
    return max(scores, wide)


def plan_blocks(
    *, weights: int, kv_block: int, logits: int, workspace: int, budget: int, wanted: int, smallest: int
) -> MemoryPlan:
    """As many cache blocks as are wanted, fewer if memory is short, but at least ``smallest``: those of one sequence of
    full length, or what the recipe asks for. That may itself be too much: ``require_fit`` then says so.
    """
    left = budget - weights - logits - workspace
    blocks = max(smallest, min(wanted, left // kv_block))
    return MemoryPlan(
        weights=weights, kv_block=kv_block, num_blocks=blocks, logits=logits, workspace=workspace, budget=budget
    )


def require_fit(memory: MemoryPlan, features: Features, changes: list[str]) -> None:
    """Raises UserError, with the bytes and the smallest changes that would help, if the plan does not fit."""
    if memory.total <= memory.budget:
        return
    parts = ", ".join(
        f"{name} {size / GIB:.2f}"
        for name, size in (
            ("weights", memory.weights),
            ("KV cache", memory.kv_cache),
            ("logits", memory.logits),
            ("workspace", memory.workspace),
        )
    )
    raise UserError(
        f"out of memory, predicted: {memory.total / GIB:.2f} GiB per rank ({parts}) of {memory.budget / GIB:.2f} GiB, "
        f"mem_fraction_static of {features.memory_bytes / GIB:.1f} GiB ({features.memory_source}); "
        f"what would help: {'; '.join(changes)}"
    )
