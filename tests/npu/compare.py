# SPDX-License-Identifier: Apache-2.0
"""When is a result of the card right: equal, or as close to the exact one as the CPU's own rounding is.

The exact result is that of the reference kernel in float64, on the same bfloat16 numbers. Its distance from the
kernel's bfloat16 result is what rounding costs. The card may round at other points, so it is not compared with the
CPU's bfloat16 result but with the exact one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDOFF = 2.0**-8  # largest relative error of one rounding to bfloat16
# A kernel that rounds one more intermediate, as probabilities before the product with V, adds an independent error of
# the same size: a factor of 1.4. Three more would make it 2.
TYPICAL = 2.0
# In units of one rounding of the element plus the CPU's typical error. One rounding is at most 1, three are 3; a sum of
# roundings exceeds five typical errors about once in a million elements. A wrong element is off by hundreds.
WORST = 8.0


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        typical: root mean square error of the card, divided by the CPU's.
        worst: largest error of the card in the units of WORST.
        complaint: what is wrong, in words; empty if nothing is.
    """

    typical: float = 0.0
    worst: float = 0.0
    complaint: str = ""


Rule = Callable[[Tensor, Tensor, Tensor], Finding]


def equal(actual: Tensor, reference: Tensor, exact: Tensor) -> Finding:
    """For integers, and for floats that are only copied."""
    complaint = _kind(actual, reference)
    if not complaint and not torch.equal(actual, reference):
        wrong = (actual != reference).nonzero()
        where = tuple(wrong[0].tolist())
        complaint = (
            f"{len(wrong)} of {actual.numel()} elements differ, the first at {where}: "
            f"card {actual[where].item():g}, CPU {reference[where].item():g}"
        )
    return Finding(complaint=complaint)


def rounded(actual: Tensor, reference: Tensor, exact: Tensor) -> Finding:
    """For floats that are computed. ``exact`` is float64."""
    complaint = _kind(actual, reference)
    if complaint or not actual.numel():
        return Finding(complaint=complaint)
    if not bool(actual.isfinite().all()):
        bad = int((~actual.isfinite()).sum())
        return Finding(complaint=f"{bad} of {actual.numel()} elements are NaN or infinite; the CPU's are finite")
    error = (actual.double() - exact).abs()
    # a result without any rounding leaves room for a quarter of what rounding typically costs, and no division by zero
    floor = torch.finfo(reference.dtype).eps / 16 * _rms(exact)
    noise = max(_rms(reference.double() - exact), floor, torch.finfo(torch.float64).tiny)
    units = error / (ROUNDOFF * exact.abs() + noise)
    typical, worst = _rms(error) / noise, units.max().item()
    if typical > TYPICAL:
        complaint = f"its error is typically {typical:.2f} times the CPU's, at most {TYPICAL:g} is right"
    if worst > WORST:
        complaint += "; " if complaint else ""
        complaint += f"its worst element is off by {worst:.1f} roundings, at most {WORST:g} is right"
    if complaint:
        where = tuple(x.item() for x in torch.unravel_index(units.argmax(), units.shape))
        values = ", ".join(
            f"{name} {x[where].item():.6g}" for name, x in (("card", actual), ("CPU", reference), ("exact", exact))
        )
        complaint += f"; worst at {where}: {values}"
    return Finding(typical, worst, complaint)


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _kind(actual: Tensor, reference: Tensor) -> str:
    if actual.shape == reference.shape and actual.dtype == reference.dtype:
        return ""
    return (
        f"it is {actual.dtype} {tuple(actual.shape)} on the card, {reference.dtype} {tuple(reference.shape)} on the CPU"
    )
