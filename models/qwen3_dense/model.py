# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense: every layer has a dense MLP."""

from executor.blueprint import Blueprint
from executor.layers.decoder import CausalLM


def build(blueprint: Blueprint) -> CausalLM:
    return blueprint.causal_lm(mlp=lambda layer: blueprint.dense_mlp())
