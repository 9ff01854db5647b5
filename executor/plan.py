# SPDX-License-Identifier: Apache-2.0
"""Decide once: config x model x platform -> a frozen Plan, with a reason per decision.

Nothing after this asks "which mode are we in": the plan says how the model is built and how a run is scheduled, and
``--explain`` prints it. Planning needs no weights and no card, and reports everything that cannot work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

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
from executor.fusion_plan import plan_fusions
from executor.layers.decoder import CausalLM
from executor.legal_layouts import check_layout
from executor.memory import MemoryPlan
from executor.memory_plan import plan_memory
from executor.model_config import ModelConfig
from executor.moe import mc2_limits
from executor.moe_plan import groups_of, mc2_buffer_mib, moe_choices
from executor.platform.features import Features
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
    used_forms, late, fusion_decisions = plan_fusions(run, features)
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
        forms=used_forms,
        combine_in_next_norm=late,
    )
    if run.scheduler.max_prefill_tokens <= batch_size:
        raise UserError(
            f"scheduler_config.max_prefill_tokens={run.scheduler.max_prefill_tokens} must exceed the batch of "
            f"{batch_size} per rank: a step carries one token of each running answer besides the prompt's"
        )
    mc2_buffer = mc2_buffer_mib(run, config, features, groups, batch_size)
    buffers = {LAYERS: run.parallel.hccl_buffer_size, MC2: mc2_buffer}
    memory = plan_memory(run, blueprint, features, buckets, build_model(blueprint), buffers)
    decisions = [
        Decision("model", f"{run.model.model_name} ({config.model_type})", shape(config)),
        Decision("platform", features.name, f"model_config.platform_version={run.model.platform_version}"),
        Decision("dtype", str(dtype).removeprefix("torch."), why_dtype),
        Decision("exe_mode", run.model.exe_mode, "model_config.exe_mode"),
        *switch_decisions(run, features),
        *layout_decisions(run, config, groups),
        *(Decision(f"MoE strategy, {phase}", choice.strategy, choice.reason) for phase, choice in choices.items()),
        *mc2_decisions(mc2_buffer),
        *fusion_decisions,
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
