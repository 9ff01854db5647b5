# SPDX-License-Identifier: Apache-2.0
"""Cosine and sine tables of the rotary embedding, default and YaRN (arXiv 2309.00071), as Hugging Face defines them."""

import math

import torch
from torch import nn

from executor.errors import UserError
from executor.model_config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, float]:
    """``[head_dim / 2]`` frequencies in radians per token, and the factor that cos and sin are scaled by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    plain = 1.0 / rope.rope_theta**exponents
    if rope.rope_type == "default":
        return plain, 1.0

    def dimension_of(rotations: float) -> float:
        """The (fractional) dimension that turns ``rotations`` times over the original context."""
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    try:
        low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    except (ArithmeticError, ValueError):  # a logarithm of nothing, or out of range
        low, high = 0.0, -1.0
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low > high:
        raise UserError(
            f"yarn settings leave no range of frequencies to stretch: beta_fast={rope.beta_fast} must exceed "
            f"beta_slow={rope.beta_slow}, and original_max_position_embeddings={rope.original_max_position_embeddings} "
            f"and rope_theta={rope.rope_theta} must be those of the training"
        )
    ramp = (torch.arange(head_dim // 2, dtype=dtype) - low) / max(high - low, 0.001)
    # fast dimensions keep their frequency, slow ones are stretched by the factor, a ramp lies between
    keep = 1 - ramp.clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep), _attention_factor(rope)


def _attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RotaryEmbedding(nn.Module):
    """``positions [T] -> (cos, sin)``, each ``[T, 1, head_dim]`` in the model's dtype (full width, equal halves)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        if device.type == "meta":  # planning allocates nothing
            for name in ("cos", "sin"):
                empty = torch.empty(max_positions, 1, head_dim, dtype=dtype, device=device)
                self.register_buffer(name, empty, persistent=False)
            inverse_frequencies(rope, head_dim)  # but refuses what cannot work
            return
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies, scale = inverse_frequencies(rope, head_dim, exact)
        angles = torch.outer(torch.arange(max_positions, dtype=exact), frequencies)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        self.register_buffer("cos", (angles.cos() * scale).to(device, dtype), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(device, dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[positions], self.sin[positions]
