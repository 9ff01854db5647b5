# SPDX-License-Identifier: Apache-2.0
"""Which form of an operator the layers call: the fused kernel, or its twin of plain ones, with the same signature.

A wrong kernel is found by replacing one after the other (``model_config.unfused``).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields

from torch import Tensor

from executor.ops.kv import write_kv, write_kv_unfused
from executor.ops.matmul import swiglu
from executor.ops.moe import gate_topk, gate_topk_unfused
from executor.ops.norm import add_rms_norm
from executor.ops.rope import rotary, rotary_fused


@dataclass(frozen=True)
class Forms:
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotary_fused
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = write_kv
    gate_topk: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]] = gate_topk
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
    swiglu: Callable[[Tensor], Tensor] = swiglu


FUSED = tuple(field.name for field in fields(Forms))
_TWINS: dict[str, Callable] = {"rotary": rotary, "write_kv": write_kv_unfused, "gate_topk": gate_topk_unfused}


def forms(unfused: Collection[str] = ()) -> Forms:
    """Fused but for the names in ``unfused``, which are of ``FUSED``."""
    return Forms(**{name: _TWINS[name] for name in unfused})
