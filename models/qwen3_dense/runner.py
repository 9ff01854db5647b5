# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense behind the ModelRunner interface."""

from typing import Any

from executor.blueprint import Blueprint
from executor.layers.decoder import CausalLM
from executor.model_config import ModelConfig
from executor.model_runner import ModelRunner
from models.qwen3_dense.config import parse_config
from models.qwen3_dense.model import build


class Qwen3DenseRunner(ModelRunner):
    @staticmethod
    def parse_config(raw: dict[str, Any]) -> ModelConfig:
        return parse_config(raw)

    @staticmethod
    def build_model(blueprint: Blueprint) -> CausalLM:
        return build(blueprint)
