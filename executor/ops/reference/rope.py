# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: ``x * cos + rotated(x) * sin``, in two operators that round it differently.

``npu_rotary_mul`` works in fp32 and rounds once, half to even (RINT). ``npu_apply_rotary_pos_emb`` rotates q
and k together; on Atlas A2 / A3 (one kernel serves both) its bf16 result is rounded half *away from zero*,
and it computes fp16 in fp16, rounding each product and the sum.

cos and sin are full width: both halves repeated for "half", each element twice for "interleave".
Limits of the cards on D and on the head counts are not repeated here: these kernels take any even D.
Reference-only extension: fp64, computed in fp64; and fp32 for ``npu_apply_rotary_pos_emb``.
"""

import torch
from torch import Tensor

from executor.ops.reference.product import get_product
from executor.ops.schemas import define, meta, reference

define(
    "npu_rotary_mul",
    '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
)
define(
    "npu_apply_rotary_pos_emb",
    '(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout="BSND", str rotary_mode="half") -> (Tensor, Tensor)',
)


def _rotated(x: Tensor, mode: str) -> Tensor:
    """Each pair (a, b) turned to (-b, a); "half" pairs i with i + D/2, "interleave" 2i with 2i + 1."""
    if mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _check(op: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x, cos, sin: one dtype, one rank, the same even D; cos and sin may be 1 on any other axis."""
    if not (x.dtype == cos.dtype == sin.dtype):
        raise ValueError(f"{op}: input, cos and sin must share a dtype, got {x.dtype}, {cos.dtype}, {sin.dtype}")
    if cos.shape != sin.shape or cos.dim() != x.dim():
        raise ValueError(
            f"{op}: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must agree, and have the {x.dim()} dims"
            " of the input"
        )
    if x.shape[-1] % 2 or cos.shape[-1] != x.shape[-1]:
        raise ValueError(f"{op}: head dim {x.shape[-1]} must be even and equal that of cos, {cos.shape[-1]}")
    if any(c not in (1, n) for c, n in zip(cos.shape, x.shape)):
        raise ValueError(f"{op}: cos {tuple(cos.shape)} does not broadcast to the input {tuple(x.shape)}")


@reference("npu_rotary_mul")
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """``input * r1 + rotated(input) * r2``, out of place.

    Args:
        input: 4-D (BSND, BNSD, SBND) or 3-D (TND); fp16, bf16, fp32 (fp64: extension).
        r1, r2: cos and sin in the input's dtype and rank, 1 where they broadcast (the head axis at least).
        rotary_mode: "half" (what Qwen3 uses) or "interleave".

    Raises:
        ValueError: a shape, dtype or mode that does not fit.
        NotImplementedError: ``rotate`` is given.
    """
    if rotate is not None:
        raise NotImplementedError("npu_rotary_mul: rotate is not served by the reference kernel; leave it out")
    if rotary_mode not in ("half", "interleave"):
        raise ValueError(f"npu_rotary_mul: rotary_mode {rotary_mode!r} is neither 'half' nor 'interleave'")
    if input.dim() not in (3, 4):
        raise ValueError(f"npu_rotary_mul: the input must have 3 or 4 dims, got {tuple(input.shape)}")
    _check("npu_rotary_mul", input, r1, r2)
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.to(work)
    return (x * r1.to(work) + _rotated(x, rotary_mode) * r2.to(work)).to(input.dtype)


def _to_bf16_half_away(x: Tensor) -> Tensor:
    """fp32 -> bf16, ties away from zero: bit 15 is half a bf16 ulp, and the sign is stored apart."""
    bits = (x.view(torch.int32) + 0x8000) & ~0xFFFF
    # infinities have no low bits, and no NaN made from bf16 operands has enough of them to wrap around
    return bits.view(torch.float32).to(torch.bfloat16)


@reference("npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in one call, out of place.

    The vendor's eager kernel overwrites query and key and returns them, though its schema declares no alias;
    its graph form does not. A caller must therefore never read query or key again. We compute out of place
    because a kernel that mutates behind a pure schema would corrupt any compiled CPU graph, which trusts the
    schema.

    Args:
        query, key: [B, S, N, D] for "BSND", [T, N, D] for "TND"; fp16 or bf16 (fp32, fp64: extension).
        cos, sin: [B, S, 1, D] or [T, 1, D], same dtype.
        layout: "BSND" or "TND". The vendor's eager form takes any other string for BSND; we refuse it.
        rotary_mode: "half" only, as on A2 / A3.

    Raises:
        ValueError: a layout, shape or dtype that does not fit.
        NotImplementedError: a rotary_mode other than "half".
    """
    op = "npu_apply_rotary_pos_emb"
    if layout not in ("BSND", "TND"):
        raise ValueError(f"{op}: layout {layout!r} is neither 'BSND' nor 'TND'")
    if rotary_mode != "half":
        raise NotImplementedError(f"{op}: rotary_mode {rotary_mode!r}; only 'half' exists on every product")
    outputs = []
    for x in (query, key):
        if x.dim() != len(layout):
            raise ValueError(f"{op}: layout {layout} needs {len(layout)} dims, got {tuple(x.shape)}")
        _check(op, x, cos, sin)
        if x.dtype == torch.bfloat16:
            y = x.float() * cos.float() + _rotated(x.float(), "half") * sin.float()
            outputs.append(y.to(x.dtype) if get_product() == "950" else _to_bf16_half_away(y))
        else:  # each product and the sum round to the input's own dtype
            outputs.append(x * cos + _rotated(x, "half") * sin)
    return outputs[0], outputs[1]


@meta("npu_rotary_mul")
def _rotary_mul_meta(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    return torch.empty_like(input)


@meta("npu_apply_rotary_pos_emb")
def _apply_rotary_pos_emb_meta(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)
