# SPDX-License-Identifier: Apache-2.0
"""Decide once: config x model x platform -> a frozen Plan, with a reason per decision.

Nothing after this asks "which mode are we in": the plan says how the model is built and how a run is scheduled, and
``--explain`` prints it. Planning needs no weights and no card, and reports everything that cannot work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from executor.batch import Phase
from executor.blueprint import Blueprint
from executor.buckets import plan_buckets
from executor.config import RunConfig
from executor.decisions import (
    Decision,
    layout_decisions,
    mc2_decisions,
    memory_decisions,
    not_built,
    shape,
    switch_decisions,
    why_order,
)
from executor.errors import UserError
from executor.kv_cache import scratch_blocks
from executor.layers.decoder import CausalLM
from executor.legal_layouts import check_layout
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
from executor.model_config import ModelConfig
from executor.moe import mc2_limits
from executor.moe_plan import groups_of, mc2_buffer_mib, moe_choices
from executor.platform.features import GIB, Features
from executor.platform.npu import LAYERS, MC2
from executor.quant.packed import PackedLinear
from executor.quant.scheme import LinearScheme
from executor.quant.unquantized import UnquantizedLinear
from executor.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``buckets``: rows that a decode step of an attention group may have. ``buffer_mib``: of the communicators, by
    purpose; None: HCCL's default."""

    run: RunConfig
    features: Features
    blueprint: Blueprint
    buckets: tuple[int, ...]
    max_seq_len: int
    memory: MemoryPlan
    buffer_mib: Mapping[str, int | None]
    decisions: tuple[Decision, ...]

    @property
    def config(self) -> ModelConfig:
        return self.blueprint.config

    @property
    def batch_size(self) -> int:
        """Sequences that an attention group decodes together."""
        return self.buckets[-1]

    @property
    def block_size(self) -> int:
        return self.run.scheduler.block_size

    @property
    def max_blocks(self) -> int:
        """Cache blocks of the longest sequence."""
        return -(-self.max_seq_len // self.block_size)


def make_plan(
    run: RunConfig, config: ModelConfig, features: Features, build_model: Callable[[Blueprint], CausalLM]
) -> Plan:
    """Raises UserError if the layout is illegal for this model, or the run would not fit in memory."""
    dtype, why_dtype = _dtype(run, config, features)
    if run.model.exe_mode not in features.exe_modes:
        raise UserError(
            f"model_config.exe_mode={run.model.exe_mode} does not run on {features.name}; one of "
            f"{', '.join(features.exe_modes)}"
        )
    max_seq_len, why_length = _max_seq_len(run, config)
    check_layout(run.parallel, config)
    batch_size = run.scheduler.batch_size // run.parallel.attn_dp_size
    buckets = plan_buckets(batch_size, run.scheduler.decode_buckets)
    choices = moe_choices(run, config, features, batch_size)
    groups = groups_of(run, choices)
    scheme, why_scheme = _scheme(dtype, features)
    blueprint = Blueprint(
        config=config,
        groups=groups,
        storage=Storage(dtype, torch.device("meta"), features.out_in_order),
        scheme=scheme,
        max_positions=-(-max_seq_len // run.scheduler.block_size) * run.scheduler.block_size,
        sharded=run.parallel.sharded_phases,
        exchange_heads=frozenset(("prefill",)) if run.parallel.sequence_parallel_prefill else frozenset(),
        moe_strategies={phase: choice.strategy for phase, choice in choices.items()},
        mc2_sends_weights=features.name in mc2_limits.LIMITS and mc2_limits.LIMITS[features.name].send_weights,
        balanced_gate=run.model.force_eplb,
    )
    if run.scheduler.max_prefill_tokens <= batch_size:
        raise UserError(
            f"scheduler_config.max_prefill_tokens={run.scheduler.max_prefill_tokens} must exceed the batch of "
            f"{batch_size} per rank: a step carries one token of each running answer besides the prompt's"
        )
    mc2_buffer = mc2_buffer_mib(run, config, features, groups, batch_size)
    buffers = {LAYERS: run.parallel.hccl_buffer_size, MC2: mc2_buffer}
    memory = _memory(run, blueprint, features, buckets, build_model(blueprint), buffers)
    decisions = [
        Decision("model", f"{run.model.model_name} ({config.model_type})", shape(config)),
        Decision("platform", features.name, f"model_config.platform_version={run.model.platform_version}"),
        Decision("dtype", str(dtype).removeprefix("torch."), why_dtype),
        Decision("exe_mode", run.model.exe_mode, "model_config.exe_mode"),
        *switch_decisions(run, features),
        *layout_decisions(run, config, groups),
        *(Decision(f"MoE strategy, {phase}", choice.strategy, choice.reason) for phase, choice in choices.items()),
        *mc2_decisions(mc2_buffer),
        Decision("linear layers", type(scheme).__name__, why_scheme),
        Decision("weight order", "[out, in]" if features.out_in_order else "[in, out]", why_order(features)),
        Decision("max_seq_len", f"{max_seq_len} tokens", why_length),
        Decision("decode batch", f"{batch_size} rows", "batch_size / attn_dp_size"),
        Decision("decode buckets", ", ".join(map(str, buckets)), "rows of a step, at most decode_buckets of them"),
        Decision(
            "prefill step",
            f"<= {run.scheduler.max_prefill_tokens} tokens",
            "scheduler_config.max_prefill_tokens; longer prompts are chunked",
        ),
        *memory_decisions(run, features, memory),
        *(Decision("not built yet", wish, "the recipe can be planned, not run") for wish in not_built(run, features)),
    ]
    return Plan(
        run=run,
        features=features,
        blueprint=blueprint,
        buckets=buckets,
        max_seq_len=max_seq_len,
        memory=memory,
        buffer_mib=buffers,
        decisions=tuple(decisions),
    )


def _dtype(run: RunConfig, config: ModelConfig, features: Features) -> tuple[torch.dtype, str]:
    name, reason = run.model.dtype, "model_config.dtype"
    if name == "auto":
        name, reason = config.dtype or "bfloat16", "dtype of config.json"  # type: ignore[assignment]
    if name not in features.float_types:
        raise UserError(
            f"model_config.dtype={name} does not run on {features.name}; one of {', '.join(features.float_types)}"
        )
    return getattr(torch, name), reason


def _scheme(dtype: torch.dtype, features: Features) -> tuple[LinearScheme, str]:
    if features.device_type == "cpu" and dtype == torch.bfloat16 and PackedLinear.available():
        return PackedLinear(), "bfloat16 on a CPU with oneDNN: packed weights are read faster"
    return UnquantizedLinear(), "floating-point weights, used as loaded"


def _max_seq_len(run: RunConfig, config: ModelConfig) -> tuple[int, str]:
    wanted, most = run.scheduler.max_seq_len, config.context_length
    if wanted is None:
        return most, "context length of the model"
    if wanted > most:
        raise UserError(
            f"scheduler_config.max_seq_len={wanted} exceeds the model's context of {most}; lower it, or extend the "
            "context with model_config.rope_scaling (YaRN)"
        )
    return wanted, "scheduler_config.max_seq_len"


def _memory(
    run: RunConfig,
    blueprint: Blueprint,
    features: Features,
    buckets: tuple[int, ...],
    model: CausalLM,
    buffer_mib: Mapping[str, int | None],
) -> MemoryPlan:
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
