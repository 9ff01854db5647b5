# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of q and k, in tokens-heads-dim layout.

T: tokens of all sequences.  N: heads (those of q and k differ).  D: head dim.
"""

import torch
from torch import Tensor

ROTARY_HALF = "half"  # pairs element i with i + D/2, the convention of every Qwen3 checkpoint
LAYOUT_TND = "TND"


def rotary(q_TND: Tensor, k_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k, out of place, rounding half to even.

    Args:
        q_TND, k_TND: [T, Nq, D] and [T, Nk, D], D even.
        cos_T1D, sin_T1D: [T, 1, D], both halves repeated, in the dtype of q and k.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    return (
        torch.ops.npu.npu_rotary_mul(q_TND, cos_T1D, sin_T1D, ROTARY_HALF),
        torch.ops.npu.npu_rotary_mul(k_TND, cos_T1D, sin_T1D, ROTARY_HALF),
    )


def rotary_fused(q_TND: Tensor, k_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
    """``rotary`` in one kernel. Never read ``q_TND`` or ``k_TND`` afterwards: an eager card overwrites them.

    On Atlas A2 / A3 bf16 results round half away from zero, so a tie may differ from ``rotary`` by one ulp.
    """
    q, k = torch.ops.npu.npu_apply_rotary_pos_emb(q_TND, k_TND, cos_T1D, sin_T1D, LAYOUT_TND, ROTARY_HALF)
    return q, k
