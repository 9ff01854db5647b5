# SPDX-License-Identifier: Apache-2.0
"""Our calls of SwiGLU and of the grouped matmul over experts.

Shape letters: R rows in expert order, K input features, N output features, E experts.
"""

import torch
from torch import Tensor

SINGLE_OUTPUT = 3  # split_item: one x in, one tensor out
GROUP_BY_ROWS = 0  # group_type: the groups partition the rows of x; the schema's default None raises
COUNTS = 1  # group_list_type: rows per expert


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``x [..., 2I] = gate | up``. Returns ``[..., I]`` in x's dtype."""
    return torch.ops.npu.npu_swiglu(x)


def grouped_matmul(x_RK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix: the first ``counts[0]`` rows are expert 0's, and so on.

    ``counts_E`` int64. Returns ``[R, N]`` in x's dtype; rows past ``counts_E.sum()`` are undefined.
    """
    return torch.ops.npu.npu_grouped_matmul(
        [x_RK],
        [weight_EKN],
        group_list=counts_E,
        split_item=SINGLE_OUTPUT,
        group_type=GROUP_BY_ROWS,
        group_list_type=COUNTS,
    )[0]
