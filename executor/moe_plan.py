# SPDX-License-Identifier: Apache-2.0
"""The part of a plan that is about experts: strategies, the groups they need, and the buffer of the MC2 kernels."""

from collections.abc import Mapping

from executor.batch import PHASES, Phase
from executor.config import RunConfig
from executor.model_config import ModelConfig, MoeConfig
from executor.moe import mc2_limits
from executor.moe.strategy import Choice, StrategyName, choose
from executor.parallel.groups import NAMES, Groups, planned_groups
from executor.platform.features import Features


def groups_of(run: RunConfig, choices: Mapping[Phase, Choice]) -> Groups:
    """The groups of rank 0; MC2's exists only if a phase uses it."""
    sizes = {name: getattr(run.parallel, f"{name}_size") for name in NAMES if name != "moe_ep_mc2"}
    uses_mc2 = any(choice.strategy == "ep_mc2" for choice in choices.values())
    return planned_groups(0, **sizes, moe_ep_mc2=run.parallel.moe_ep_size if uses_mc2 else 1)


def _mc2_sizes(run: RunConfig, config: ModelConfig, moe: MoeConfig, batch_size: int) -> dict[str, int]:
    """What the MC2 kernels work on in a decode step of ``batch_size`` rows per attention group."""
    return {
        "hidden_size": config.hidden_size,
        "tokens": -(-batch_size // run.parallel.attn_tp_size),
        "top_k": moe.num_experts_per_tok,
        "num_experts": moe.num_experts,
        "moe_ep": run.parallel.moe_ep_size,
    }


def mc2_buffer_mib(
    run: RunConfig, config: ModelConfig, features: Features, groups: Groups, batch_size: int
) -> int | None:
    """What the MC2 kernels need in their communicator, or what the recipe gives if that is more."""
    if groups.moe_ep_mc2.size == 1 or features.name not in mc2_limits.LIMITS or config.moe is None:
        return None
    least = mc2_limits.buffer_bytes(features.name, **_mc2_sizes(run, config, config.moe, batch_size))
    return max(-(-least // (1 << 20)), run.parallel.hccl_buffer_size or 0)


def moe_choices(run: RunConfig, config: ModelConfig, features: Features, batch_size: int) -> dict[Phase, Choice]:
    """The strategy of each phase; none for a model without experts. Raises UserError if the recipe asks for one that
    cannot work."""
    parallel, moe = run.parallel, config.moe
    if moe is None or not config.moe_layers:
        return {}
    refused = mc2_limits.refusal(
        features.name if features.device_type == "npu" else "cpu",
        moe_tp=parallel.moe_tp_size,
        **_mc2_sizes(run, config, moe, batch_size),
    )
    wanted: dict[Phase, StrategyName | None] = {
        "prefill": parallel.moe_prefill_strategy,
        "decode": parallel.moe_decode_strategy,
    }
    return {
        phase: choose(
            phase,
            sharded=phase in parallel.sharded_phases,
            moe_ep=parallel.moe_ep_size,
            top_k=moe.num_experts_per_tok,
            mc2_refusal=refused,
            static=phase == "decode" and run.model.exe_mode != "eager",
            wanted=wanted[phase],
        )
        for phase in PHASES
    }
