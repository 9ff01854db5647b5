# SPDX-License-Identifier: Apache-2.0
"""The plan in words: what was decided, and why. Nothing is decided here."""

from dataclasses import dataclass

from executor.batch import PHASES
from executor.config import RunConfig
from executor.kv_cache import scratch_blocks
from executor.memory import COMMUNICATORS, GRAPHS, LOGITS, RUNTIME, WEIGHTS, WORKSPACE, MemoryPlan
from executor.model_config import ModelConfig
from executor.parallel.groups import Groups
from executor.platform.features import GIB, Features


@dataclass(frozen=True)
class Decision:
    what: str
    value: str
    reason: str


def not_built(run: RunConfig, features: Features) -> list[str]:
    """What the recipe asks for that this version can plan but not run."""
    model, on_npu = run.model, features.device_type == "npu"
    wishes = {
        "model_config.enable_weight_nz=true": model.enable_weight_nz and on_npu,
        "model_config.enable_profiler=true on an NPU": model.enable_profiler and on_npu,
    }
    return [wish for wish, asked in wishes.items() if asked]


def shape(config: ModelConfig) -> str:
    text = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads"
    text += f" over {config.num_key_value_heads} KV heads of {config.head_dim}"
    if config.moe is not None and config.moe_layers:
        text += f", {config.moe.num_experts} experts, top {config.moe.num_experts_per_tok}"
    return text


def layout_decisions(run: RunConfig, config: ModelConfig, groups: Groups) -> list[Decision]:
    parallel = run.parallel
    if parallel.world_size == 1:
        return [Decision("layout", "one device", "parallel_config.world_size=1")]
    layout = ", ".join(f"{name} {size}" for name, size in groups.sizes().items() if size > 1)
    decisions = [Decision("layout", layout, f"parallel_config, {parallel.world_size} ranks")]
    for phase in PHASES:
        if phase in parallel.sharded_phases:
            why = f"attn_dp {parallel.attn_dp_size}" if parallel.attn_dp_size > 1 else "sequence_parallel_prefill"
            what = f"{why}: each rank holds its own between layers, gathered where weights are split"
            decisions.append(Decision(f"tokens, {phase}", "sharded", what))
        else:
            what = "attn_dp 1: every rank holds all tokens, partial sums are all-reduced"
            decisions.append(Decision(f"tokens, {phase}", "replicated", what))
    if parallel.attn_tp_size > config.num_key_value_heads:
        copies = parallel.attn_tp_size // config.num_key_value_heads
        decisions.append(Decision("KV heads", "1 per rank", f"replicated {copies} times: fewer KV heads than ranks"))
    return decisions


def mc2_decisions(buffer_mib: int | None) -> list[Decision]:
    if buffer_mib is None:
        return []
    return [Decision("MC2 buffer", f"{buffer_mib} MiB", "documented formula, or hccl_buffer_size if that is more")]


def switch_decisions(run: RunConfig, features: Features) -> list[Decision]:
    """Switches of model_config that are on, and what becomes of them here."""
    decisions = []
    if run.model.enable_cache_compile:
        eager = run.model.exe_mode == "eager"
        why = "exe_mode eager compiles nothing" if eager else "model_config.enable_cache_compile"
        decisions.append(Decision("compile cache", "off" if eager else "on", why))
    if run.model.enable_weight_nz:
        on_npu = features.device_type == "npu"
        why = "model_config.enable_weight_nz" if on_npu else "NZ is a format of the NPU"
        decisions.append(Decision("weight format", "FRACTAL_NZ" if on_npu else "ND", why))
    if run.model.force_eplb:
        decisions.append(Decision("router", "experts in turn", "model_config.force_eplb: the answers mean nothing"))
    return decisions


def why_order(features: Features) -> str:
    if features.out_in_order:
        return "few-token matmuls read [out, in] rows faster on a CPU"
    return "a [out, in] weight costs a Transpose node per use in a GE graph"


def memory_decisions(run: RunConfig, features: Features, memory: MemoryPlan) -> list[Decision]:
    def gib(size: int) -> str:
        return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"

    scratch = scratch_blocks(run.scheduler.batch_size // run.parallel.attn_dp_size, run.scheduler.block_size)
    tokens = (memory.num_blocks - scratch) * run.scheduler.block_size
    room = f"{memory.num_blocks} blocks, room for {tokens} tokens"
    if run.scheduler.num_blocks:
        room += " (scheduler_config.num_blocks)"
    why = {
        WEIGHTS: "per rank, counted on the meta device",
        LOGITS: "one row per decode row, model dtype and float32",
        WORKSPACE: "activations of the widest point of a prefill step, estimated",
        GRAPHS: "activations of each compiled decode step, estimated",
        COMMUNICATORS: "HCCL: two buffers each, hccl_buffer_size or 200 MiB",
        RUNTIME: "driver and runtime, as users report",
    }
    return [
        *(Decision(name, gib(size), why[name]) for name, size in memory.parts.items() if size),
        Decision("KV cache", gib(memory.kv_cache), room),
        Decision(
            "memory",
            f"{gib(memory.total)} of {gib(memory.budget)}",
            f"fits: mem_fraction_static {run.scheduler.mem_fraction_static} of {features.memory_bytes / GIB:.1f} GiB, "
            f"{features.memory_source}",
        ),
    ]
