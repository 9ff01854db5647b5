# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: ``config.json`` to ModelConfig."""

from typing import Any

from executor.errors import UserError
from executor.model_config import ModelConfig, MoeConfig, parse_shared_fields


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a ``model_type: qwen3_moe`` checkpoint; experts are ``num_experts`` or ``num_local_experts``.

    A layer is sparse unless it is listed in ``mlp_only_layers`` or skipped by ``decoder_sparse_step``, as in HF.
    Raises UserError for what is missing or not supported.
    """
    from transformers import Qwen3MoeConfig

    hf, shared = parse_shared_fields(raw, Qwen3MoeConfig)
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        value = getattr(hf, key)
        if type(value) is not int or not 0 <= value < 2**31:  # transformers does not check num_local_experts
            raise UserError(f"config.json: {key}={value!r} must be an integer >= 0")
    moe = MoeConfig(
        num_experts=hf.num_experts,
        num_experts_per_tok=hf.num_experts_per_tok,
        moe_intermediate_size=hf.moe_intermediate_size,
        norm_topk_prob=bool(hf.norm_topk_prob),
    )
    if hf.decoder_sparse_step < 1:
        raise UserError(f"config.json: decoder_sparse_step={hf.decoder_sparse_step} must be at least 1")
    sparse = tuple(
        i
        for i in range(hf.num_hidden_layers)
        if i not in hf.mlp_only_layers and moe.num_experts > 0 and (i + 1) % hf.decoder_sparse_step == 0
    )
    if sparse and not 1 <= moe.num_experts_per_tok <= moe.num_experts:
        raise UserError(
            f"config.json: num_experts_per_tok={moe.num_experts_per_tok} must be between 1 and "
            f"num_experts={moe.num_experts}"
        )
    return ModelConfig(**shared, moe=moe, moe_layers=sparse)
