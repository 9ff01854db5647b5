# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and its fusions with the residual add: where each product rounds is the whole content of this file.

Rounding points (a row is one operator, "low" is the fp16 or bf16 input dtype, every other step is fp32):

==================  ==================================  ================================
operator            Atlas A2 / A3                       Ascend 950
==================  ==================================  ================================
npu_rms_norm        y once                              y once
npu_add_rms_norm    sum, sum * rstd, y: each to low     sum output and y, each once
  ... its rstd      of the sum already rounded          of the fp32 sum
  ..._cast          as above, y_fp32 = fp32(y)          y_fp32 unrounded, y = low(y_fp32)
==================  ==================================  ================================

Source: the golden scripts of the vendor's ops-nn repository. One A2 tiling takes the variance of the
unrounded sum instead, and the A2 kernel of ``_cast`` rounds its y once; both stay within one ulp of what is
done here.

Reference-only extension: fp64 inputs are computed in fp64 and then rstd (and y_fp32) are fp64 too; the
vendor's table ends at fp32 (at fp16 and bf16 for ``_cast``).
"""

import torch
from torch import Tensor

from executor.ops.reference.product import get_product
from executor.ops.schemas import define, meta, reference

define(
    "npu_rms_norm",
    "(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
)
define(
    "npu_add_rms_norm",
    "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor)",
)
define(
    "npu_add_rms_norm_cast",
    "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor, Tensor)",
)
define(
    "npu_add_rms_norm_v2",
    "(Tensor(a!) x1, Tensor(b!) x2, Tensor gamma, float epsilon=9.9999999999999995e-07) -> Tensor",
)
define(
    "npu_add_rms_norm_v2_functional",
    "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor)",
)


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rstd(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the trailing dims that ``gamma`` covers, kept as dims of size one."""
    dims = tuple(range(-gamma.dim(), 0))
    return torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)


def _check_gamma(op: str, x: Tensor, gamma: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if gamma.dim() == 0 or gamma.shape != x.shape[-gamma.dim() :]:
        raise ValueError(f"{op}: gamma {tuple(gamma.shape)} must equal the trailing dims of the input {tuple(x.shape)}")
    if gamma.dtype not in dtypes:
        raise ValueError(f"{op}: gamma is {gamma.dtype} with an input of {x.dtype}, which the card refuses")


def _check_add(op: str, x1: Tensor, x2: Tensor, gamma: Tensor) -> None:
    if x1.shape != x2.shape or x1.dtype != x2.dtype:
        raise ValueError(f"{op}: x1 {x1.dtype} {tuple(x1.shape)} and x2 {x2.dtype} {tuple(x2.shape)} must agree")
    _check_gamma(op, x1, gamma, (x1.dtype,))


def _add_rms_norm(op: str, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Returns (y_fp32, y, rstd, sum) as the chosen product rounds them.

    A single fp16 or bf16 operation of PyTorch is the fp32 operation with one RINT at the end, so the A2 / A3
    column is written with plain low-precision operators.
    """
    _check_add(op, x1, x2, gamma)
    work = _work_dtype(x1)
    if get_product() == "950":
        total = x1.to(work) + x2.to(work)
        rstd = _rstd(total, gamma, epsilon)
        wide = total * rstd * gamma.to(work)
        return wide, wide.to(x1.dtype), rstd, total.to(x1.dtype)
    total = x1 + x2
    rstd = _rstd(total.to(work), gamma, epsilon)
    y = (total.to(work) * rstd).to(x1.dtype) * gamma
    return y.to(work), y, rstd, total


@reference("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Root mean square norm, all in fp32 with one rounding at the end (HF rounds x * rstd as well).

    Args:
        input: fp16, bf16 or fp32 (fp64: extension), 1 to 8 dims.
        gamma: the trailing dims of ``input``; its dtype is the input's, or fp32 with an fp16 or bf16 input.

    Returns:
        y like ``input``, and rstd in fp32 with the normalised dims kept as ones.

    Raises:
        ValueError: gamma's shape or dtype does not fit.
    """
    _check_gamma("npu_rms_norm", input, gamma, (input.dtype, torch.float32))
    work = _work_dtype(input)
    x = input.to(work)
    rstd = _rstd(x, gamma, epsilon)
    return (x * rstd * gamma.to(work)).to(input.dtype), rstd


@reference("npu_add_rms_norm")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Norm of ``x1 + x2``. Mind the order: returns (y, rstd, sum).

    Args:
        x1, x2: same shape, fp16, bf16 or fp32 (fp64: extension).
        gamma: the trailing dims of ``x1``, in its dtype.

    Raises:
        ValueError: shapes or dtypes disagree.
    """
    _, y, rstd, total = _add_rms_norm("npu_add_rms_norm", x1, x2, gamma, epsilon)
    return y, rstd, total


@reference("npu_add_rms_norm_cast")
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``npu_add_rms_norm`` with y in fp32 as well, for a router gate: returns (y_fp32, y, rstd, sum).

    Only on the 950 does y_fp32 hold more digits than y. Arguments and errors as ``npu_add_rms_norm``; the
    vendor takes fp16 and bf16 (fp32 and fp64: extension).
    """
    wide, y, rstd, total = _add_rms_norm("npu_add_rms_norm_cast", x1, x2, gamma, epsilon)
    return wide, y, rstd, total


@reference("npu_add_rms_norm_v2")
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``npu_add_rms_norm`` in place: x1 becomes y, x2 becomes the sum; returns rstd."""
    _, y, rstd, total = _add_rms_norm("npu_add_rms_norm_v2", x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


@reference("npu_add_rms_norm_v2_functional")
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """What compilers turn ``npu_add_rms_norm_v2`` into: returns (rstd, y, sum)."""
    _, y, rstd, total = _add_rms_norm("npu_add_rms_norm_v2_functional", x1, x2, gamma, epsilon)
    return rstd, y, total


def _empty_rstd(x: Tensor, gamma: Tensor) -> Tensor:
    kept = x.dim() - gamma.dim()
    return x.new_empty((*x.shape[:kept], *[1] * gamma.dim()), dtype=_work_dtype(x))


@meta("npu_rms_norm")
def _rms_norm_meta(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), _empty_rstd(input, gamma)


@meta("npu_add_rms_norm")
def _add_rms_norm_meta(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x1), _empty_rstd(x1, gamma), torch.empty_like(x1)


@meta("npu_add_rms_norm_cast")
def _add_rms_norm_cast_meta(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.empty_like(x1, dtype=_work_dtype(x1))
    return wide, torch.empty_like(x1), _empty_rstd(x1, gamma), torch.empty_like(x1)


@meta("npu_add_rms_norm_v2")
def _add_rms_norm_v2_meta(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    return _empty_rstd(x1, gamma)


@meta("npu_add_rms_norm_v2_functional")
def _add_rms_norm_v2_functional_meta(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_rstd(x1, gamma), torch.empty_like(x1), torch.empty_like(x1)
