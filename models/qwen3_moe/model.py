# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: a layer has routed experts, or a dense MLP where the config says so."""

from executor.blueprint import Blueprint
from executor.layers.decoder import CausalLM


def build(blueprint: Blueprint) -> CausalLM:
    sparse = set(blueprint.config.moe_layers)
    return blueprint.causal_lm(mlp=lambda layer: blueprint.moe_block() if layer in sparse else blueprint.dense_mlp())
