# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense: ``config.json`` to ModelConfig."""

from typing import Any

from executor.model_config import ModelConfig, parse_shared_fields


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a ``model_type: qwen3`` checkpoint. Raises UserError for what is missing or not supported."""
    from transformers import Qwen3Config

    _, shared = parse_shared_fields(raw, Qwen3Config)
    return ModelConfig(**shared)
