# SPDX-License-Identifier: Apache-2.0
"""Which group sizes are legal for a model: what each of them has to divide."""

import itertools
from collections.abc import Iterator

from executor.config_parallel import ParallelSection
from executor.errors import UserError
from executor.model_config import ModelConfig


def _axes(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Per key of ``parallel_config`` the axes, by their names in config.json, that its size divides."""
    axes = {
        "attn_tp_size": {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
        },
        "embed_tp_size": {"vocab_size": config.vocab_size},
        "lmhead_tp_size": {"vocab_size": config.vocab_size},
    }
    if len(config.moe_layers) < config.num_hidden_layers:
        axes["dense_tp_size"] = {"intermediate_size": config.intermediate_size}
    if config.moe is not None and config.moe_layers:
        axes["moe_tp_size"] = {"moe_intermediate_size": config.moe.moe_intermediate_size}
        axes["moe_ep_size"] = {"num_experts": config.moe.num_experts}
    return axes


# Keys about a part that not every model has.
PARTS = {
    "moe_prefill_strategy": "experts",
    "moe_decode_strategy": "experts",
    "dense_tp_size": "dense layers",
    "moe_tp_size": "experts",
    "moe_ep_size": "experts",
}


def _splits(size: int, name: str, length: int) -> bool:
    """Whether ``size`` ranks can hold equal parts of an axis. KV heads are replicated if there are too few."""
    return length % size == 0 or (name == "num_key_value_heads" and size % length == 0)


def legal_sizes(config: ModelConfig, world_size: int) -> dict[str, list[int]]:
    """Per key the sizes that divide ``world_size`` and what they split of this model. Keys that split nothing of
    this model are not there."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    legal = {}
    for key, axes in _axes(config).items():
        legal[key] = [n for n in divisors if all(_splits(n, *axis) for axis in axes.items())]
    if "moe_ep_size" in legal:  # the two share the ranks: each needs its partner
        tp, ep = legal["moe_tp_size"], legal["moe_ep_size"]
        legal["moe_tp_size"] = [n for n in tp if world_size // n in ep]
        legal["moe_ep_size"] = [n for n in ep if world_size // n in tp]
    return legal


def legal_layouts(config: ModelConfig, world_size: int) -> Iterator[dict[str, int]]:
    """Every product of legal sizes; ``moe_tp_size`` follows from ``moe_ep_size``."""
    legal = legal_sizes(config, world_size)
    keys = [key for key in legal if key != "moe_tp_size"]
    for sizes in itertools.product(*(legal[key] for key in keys)):
        layout = dict(zip(keys, sizes))
        if "moe_ep_size" in layout:
            layout["moe_tp_size"] = world_size // layout["moe_ep_size"]
        yield layout


def check_layout(parallel: ParallelSection, config: ModelConfig) -> None:
    """Raises UserError, with the legal sizes for this model, if a size does not divide what it splits, or if the two
    MoE sizes do not use all ranks: every rank holds a part of the experts, and no part is held twice."""
    world = parallel.world_size
    legal = legal_sizes(config, world)
    if "moe_ep_size" in legal and parallel.moe_tp_size * parallel.moe_ep_size != world:
        pairs = ", ".join(f"{world // n} * {n}" for n in legal["moe_ep_size"]) or "none"
        raise UserError(
            f"parallel_config.moe_tp_size={parallel.moe_tp_size} * moe_ep_size={parallel.moe_ep_size} must equal "
            f"world_size={world}; legal for this model: {pairs}"
        )
    present = {PARTS[key] for key in legal if key in PARTS}
    for key, part in PARTS.items():
        value = getattr(parallel, key)
        if part not in present and value not in (1, None):
            raise UserError(f"parallel_config.{key}={value}, but this model has no {part}; leave it out")
    for key, axes in _axes(config).items():
        size = getattr(parallel, key)
        if size in legal[key]:
            continue
        lengths = " and ".join(f"{name}={length}" for name, length in axes.items())
        raise UserError(
            f"parallel_config.{key}={size} does not fit {lengths} of this model; "
            f"legal with world_size={world}: {', '.join(map(str, legal[key])) or 'none'}"
        )
