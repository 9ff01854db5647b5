# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as the layers call it: the outputs a model uses, in the order it uses them."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x`` [..., H] with ``gamma`` [H]: fp32 inside, one rounding to x's dtype.

    Raises ValueError when gamma's shape or dtype does not fit.
    """
    y, _ = torch.ops.npu.npu_rms_norm(x, gamma, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (y, new_residual), both like ``x`` [..., H]: new_residual = residual + x, y = its RMSNorm.

    Rounds like HF on Atlas A2 / A3 and once only on Ascend 950. Raises ValueError when shapes or dtypes
    disagree.
    """
    y, _, total = torch.ops.npu.npu_add_rms_norm(residual, x, gamma, eps)
    return y, total


def add_rms_norm_cast(x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``add_rms_norm`` ahead of an fp32 router gate: returns (y_fp32, y, new_residual)."""
    y_fp32, y, _, total = torch.ops.npu.npu_add_rms_norm_cast(residual, x, gamma, eps)
    return y_fp32, y, total
