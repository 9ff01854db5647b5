# SPDX-License-Identifier: Apache-2.0
"""Plain BF16 weights in oneDNN's blocked order, for a CPU.

With few tokens a matmul is bound by how fast its weights are read, and oneDNN reads its own order faster than rows.
The packed tensor replaces the plain one, so memory stays the same; only a head that is tied to the embedding gets a
copy of its own, since rows are looked up in the plain one. The two functions used are those that torch's compiler
emits for a frozen linear layer.
"""

import torch
from torch import nn

from executor.quant.unquantized import UnquantizedLinear


class PackedLinear(UnquantizedLinear):
    """Declared and loaded as an unquantized linear; packed by ``finalize``, after which it can be applied."""

    @staticmethod
    def available() -> bool:
        """Whether this CPU and this build of torch have BF16 oneDNN kernels."""
        return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def finalize(self, layer: nn.Module) -> None:
        weight = layer.weight.data.t().contiguous()  # type: ignore[operator]
        del layer.weight
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, layer.packed, bias, "none", [], "")
