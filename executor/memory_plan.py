# SPDX-License-Identifier: Apache-2.0
"""The part of a plan that is about memory: what a run takes of a device, how many cache blocks are left, and what would
help if there are too few."""

from collections.abc import Mapping

from executor.batch import Phase
from executor.blueprint import Blueprint
from executor.config import RunConfig
from executor.errors import UserError
from executor.kv_cache import scratch_blocks
from executor.layers.decoder import CausalLM
from executor.memory import (
    COMMUNICATORS,
    GRAPHS,
    LOGITS,
    RUNTIME,
    WEIGHTS,
    WORKSPACE,
    MemoryPlan,
    communicator_bytes,
    kv_block_bytes,
    plan_blocks,
    reference_workspace_bytes,
    require_fit,
    weight_bytes,
    workspace_bytes,
)
from executor.platform.features import GIB, Features
from executor.quant.packed import PackedLinear


def plan_memory(
    run: RunConfig,
    blueprint: Blueprint,
    features: Features,
    buckets: tuple[int, ...],
    model: CausalLM,
    buffer_mib: Mapping[str, int | None],
) -> MemoryPlan:
    """Raises UserError, with the smallest changes that would help, if the run does not fit."""
    config, groups, scheduler, batch_size = blueprint.config, blueprint.groups, run.scheduler, buckets[-1]
    itemsize = blueprint.storage.dtype.itemsize
    per_sequence = blueprint.max_positions // scheduler.block_size
    scratch = scratch_blocks(batch_size, scheduler.block_size)
    if scheduler.num_blocks is not None and scheduler.num_blocks <= scratch:
        raise UserError(
            f"scheduler_config.num_blocks={scheduler.num_blocks} leaves no block for a sequence: {scratch} are scratch "
            f"blocks of the {batch_size} decode rows; set at least {scratch + 1}"
        )

    # the ranks of a machine share its memory, where they have no device each
    sharers = run.parallel.world_size // max(1, len(run.parallel.hosts)) if features.device_type == "cpu" else 1

    def workspace(phase: Phase, tokens: int) -> int:
        reference = reference_workspace_bytes(blueprint, phase, tokens) if features.device_type == "cpu" else 0
        return workspace_bytes(blueprint, phase, tokens) + reference

    on_npu, compiled = features.device_type == "npu", run.model.exe_mode != "eager"
    parts = {
        WEIGHTS: weight_bytes(model) + _packed_copy(blueprint, model),
        # the model's dtype once, gathered, and a float32 copy for the sampler
        LOGITS: batch_size * config.vocab_size * (itemsize + 4),
        WORKSPACE: max(workspace("prefill", scheduler.max_prefill_tokens), workspace("decode", batch_size)),
        # a graph keeps memory of its own for what lies between its operators
        GRAPHS: sum(workspace("decode", rows) for rows in buckets) if compiled else 0,
        COMMUNICATORS: communicator_bytes(groups, buffer_mib) if on_npu else 0,
        RUNTIME: features.runtime_bytes,
    }
    memory = plan_blocks(
        parts,
        kv_block=kv_block_bytes(config, groups, scheduler.block_size, itemsize),
        budget=int(features.memory_bytes // sharers * scheduler.mem_fraction_static),
        wanted=scheduler.num_blocks or batch_size * per_sequence + scratch,
        smallest=scheduler.num_blocks or per_sequence + scratch,
    )
    changes = []
    if run.parallel.world_size > 1 or features.device_type == "npu":
        changes.append("more ranks (larger attn_tp_size, moe_tp_size or moe_ep_size, dense_tp_size)")
    if parts[WORKSPACE] > GIB // 4:
        changes.append(f"scheduler_config.max_prefill_tokens below {scheduler.max_prefill_tokens}")
    if memory.kv_cache > GIB // 4 and not scheduler.num_blocks:
        changes.append(f"scheduler_config.max_seq_len below {blueprint.max_positions}")
    if scheduler.num_blocks:
        changes.append(f"scheduler_config.num_blocks below {scheduler.num_blocks}")
    if parts[GRAPHS] > GIB // 4:
        changes.append(f"scheduler_config.decode_buckets below {scheduler.decode_buckets}")
    if parts[COMMUNICATORS] > GIB // 4:
        changes.append("a smaller parallel_config.hccl_buffer_size")
    if itemsize > 2:
        changes.append("model_config.dtype=bfloat16")
    if scheduler.mem_fraction_static < 0.95:
        changes.append(f"scheduler_config.mem_fraction_static above {scheduler.mem_fraction_static}")
    require_fit(memory, features, changes or ["a smaller model"])
    return memory


def _packed_copy(blueprint: Blueprint, model: CausalLM) -> int:
    """Bytes of packed weights that are kept beside others: a head tied to the embedding, and this rank's rows of an
    ``o_proj`` that is held whole."""
    if not isinstance(blueprint.scheme, PackedLinear):
        return 0
    config, itemsize = blueprint.config, blueprint.storage.dtype.itemsize
    head = config.vocab_size * config.hidden_size // blueprint.groups.lmhead_tp.size if model.shares_head else 0
    o_proj = config.num_attention_heads * config.head_dim * config.hidden_size // blueprint.groups.attn_tp.size
    rows = config.num_hidden_layers * o_proj if blueprint.exchange_heads else 0
    return itemsize * (head + rows)
