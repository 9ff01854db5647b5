# SPDX-License-Identifier: Apache-2.0
"""Will it fit: bytes per rank, before anything is allocated.

Weights are counted from the model itself, built on ``meta`` for this rank, so there is no second set of shape
formulas to go stale. The workspace is the largest set of activations alive at once, an estimate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from executor.batch import Phase
from executor.blueprint import Blueprint
from executor.errors import UserError
from executor.model_config import ModelConfig
from executor.parallel.groups import Groups, communicators
from executor.parallel.layout import shard_kv_heads
from executor.platform.features import GIB, Features

WEIGHTS, LOGITS, WORKSPACE, GRAPHS, COMMUNICATORS, RUNTIME = (
    "weights",
    "logits",
    "workspace",
    "graphs",
    "communicators",
    "runtime",
)
HCCL_BUFFSIZE = 200  # MiB, HCCL's default
MC2_ROUTE = 512  # bytes per row that dispatch leaves for combine: 128 int32


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank.

    Attributes:
        parts: all but the KV cache, by what it is.
        smallest: blocks that the run cannot do without.
        budget: ``mem_fraction_static`` of the device; everything has to fit in it.
    """

    parts: Mapping[str, int]
    kv_block: int
    num_blocks: int
    smallest: int
    budget: int

    @property
    def kv_cache(self) -> int:
        return self.kv_block * self.num_blocks

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.kv_cache

    def within(self, free: int) -> "MemoryPlan":
        """This plan with as many blocks as ``free`` bytes leave, no more than it has. What the runtime holds is not in
        ``free`` any more.

        Raises:
            UserError: fewer than ``smallest`` are left.
        """
        others = sum(self.parts.values()) - self.parts.get(RUNTIME, 0)
        blocks = min(self.num_blocks, (free - others) // self.kv_block)
        if blocks < self.smallest:
            need = others + self.smallest * self.kv_block
            raise UserError(
                f"out of memory: {free / GIB:.2f} GiB of the device are free, the run needs {need / GIB:.2f} GiB; end "
                "what else runs on it (npu-smi info shows it)"
            )
        return replace(self, num_blocks=blocks)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers. A tied head is a view of the embedding and has none of its own."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def kv_block_bytes(config: ModelConfig, groups: Groups, block_size: int, itemsize: int) -> int:
    """Keys and values of ``block_size`` tokens in all layers of this rank."""
    heads = len(shard_kv_heads(config.num_key_value_heads, groups.attn_tp))
    return 2 * config.num_hidden_layers * block_size * heads * config.head_dim * itemsize


def feed_forward_rows(blueprint: Blueprint, phase: Phase, tokens: int) -> tuple[int, int]:
    """Rows that a rank's dense MLP and its experts work on, in a step where an attention group has ``tokens``. Where
    tokens are sent to their experts it is their number on average; an uneven router needs more."""
    groups, moe = blueprint.groups, blueprint.config.moe
    top_k, experts = (moe.num_experts_per_tok, moe.num_experts) if moe is not None else (0, 0)
    if phase not in blueprint.sharded:
        return tokens, tokens * top_k
    own = -(-tokens // groups.attn_tp.size)
    entered, ep = own * groups.moe_tp.size, groups.moe_ep.size
    expanded = entered * top_k
    if blueprint.moe_strategies.get(phase) == "ep_allgather":
        expanded *= ep
    elif blueprint.moe_strategies.get(phase) == "ep_mc2":
        expanded = entered * ep * min(experts // ep, top_k)
    return own * groups.dense_tp.size, expanded


def workspace_bytes(blueprint: Blueprint, phase: Phase, tokens: int) -> int:
    """Activations of the widest point of a layer in a step of ``tokens`` tokens.

    Alive together: residual and normalised hidden states, and the larger of attention (q, k, v, output) and the
    feed-forward block (dense: gate|up and its product; MoE: expanded rows in and out, gate|up, product).
    """
    config, groups = blueprint.config, blueprint.groups
    query_heads = config.num_attention_heads // groups.attn_tp.size
    kv_heads = len(shard_kv_heads(config.num_key_value_heads, groups.attn_tp))
    attention = tokens * 2 * (query_heads + kv_heads) * config.head_dim
    dense, expanded = feed_forward_rows(blueprint, phase, tokens)
    widest = attention
    if len(config.moe_layers) < config.num_hidden_layers:
        gathered = 2 * dense * config.hidden_size if phase in blueprint.sharded else 0
        widest = max(widest, gathered + dense * 3 * config.intermediate_size // groups.dense_tp.size)
    if phase in blueprint.sharded:  # rows of the tokens of all ranks of the embedding's group, and masked ones
        looked_up = -(-tokens // groups.attn_tp.size) * groups.embed_tp.size
        widest = max(widest, 2 * looked_up * config.hidden_size)
    if config.moe is not None and config.moe_layers:
        local = config.moe.moe_intermediate_size // groups.moe_tp.size
        widest = max(widest, expanded * (2 * config.hidden_size + 3 * local))
    routes = expanded * MC2_ROUTE if blueprint.moe_strategies.get(phase) == "ep_mc2" else 0
    return blueprint.storage.dtype.itemsize * (2 * tokens * config.hidden_size + widest) + routes


def reference_workspace_bytes(blueprint: Blueprint, phase: Phase, tokens: int) -> int:
    """float32 temporaries of the reference kernels, which a card's kernels do not have: attention scores and their
    softmax for 128 queries of a step against the longest sequence, and in a MoE layer gate|up, its product and the
    rows that are summed for each token."""
    config, groups = blueprint.config, blueprint.groups
    heads = config.num_attention_heads // groups.attn_tp.size
    dense, expanded = feed_forward_rows(blueprint, phase, tokens)
    scores = 2 * 4 * min(tokens, 128) * heads * blueprint.max_positions
    wide = 4 * dense * 3 * config.intermediate_size // groups.dense_tp.size
    if config.moe is not None and config.moe_layers:
        local = config.moe.moe_intermediate_size // groups.moe_tp.size
        wide = max(wide, 4 * expanded * (3 * local + 2 * config.hidden_size))
    return max(scores, wide)


def communicator_bytes(groups: Groups, buffer_mib: Mapping[str, int | None]) -> int:
    """Buffers that HCCL allocates: one to send and one to receive per communicator, of HCCL_BUFFSIZE each.

    Args:
        buffer_mib: by purpose; None: HCCL's default.
    """
    distinct = set(communicators(0, groups.sizes()).values())
    return sum(2 * (buffer_mib.get(purpose) or HCCL_BUFFSIZE) << 20 for purpose, _ in distinct)


def plan_blocks(parts: Mapping[str, int], *, kv_block: int, budget: int, wanted: int, smallest: int) -> MemoryPlan:
    """As many cache blocks as are wanted, fewer if memory is short, but at least ``smallest``: those of one sequence of
    full length, or what the recipe asks for. That may itself be too much: ``require_fit`` then says so.
    """
    blocks = max(smallest, min(wanted, (budget - sum(parts.values())) // kv_block))
    return MemoryPlan(parts=parts, kv_block=kv_block, num_blocks=blocks, smallest=smallest, budget=budget)


def require_fit(memory: MemoryPlan, features: Features, changes: list[str]) -> None:
    """Raises UserError, with the bytes and the smallest changes that would help, if the plan does not fit."""
    if memory.total <= memory.budget:
        return
    everything = {**memory.parts, "KV cache": memory.kv_cache}
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in everything.items() if size >= GIB // 100)
    raise UserError(
        f"out of memory, predicted: {memory.total / GIB:.2f} GiB per rank ({parts}) of {memory.budget / GIB:.2f} GiB, "
        f"mem_fraction_static of {features.memory_bytes / GIB:.1f} GiB ({features.memory_source}); "
        f"what would help: {'; '.join(changes)}"
    )
