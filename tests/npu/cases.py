# SPDX-License-Identifier: Apache-2.0
"""Every call of a vendor operator that the recipes' models make on one card, as cases."""

from collections.abc import Iterator

from tests.npu.case import Case
from tests.npu.layer_cases import attention_cases, norm_cases, paged_cases, swiglu_case
from tests.npu.moe_cases import moe_cases
from tests.npu.recipes import RECIPES, Rank


def rank_cases(rank: Rank) -> Iterator[Case]:
    """All cases of a rank; sequences beyond the mask matter to attention alone."""
    steps = rank.steps()
    for step in steps[:2]:
        yield from norm_cases(rank, step)
        yield from attention_cases(rank, step)
        if rank.dense is not None:
            yield swiglu_case(rank, step, "the MLP", step.tokens, rank.dense.gate_up_proj.sizes[0])
        if rank.sparse is not None:
            yield from moe_cases(rank, step, rank.sparse)
    for step in steps[2:]:
        yield from paged_cases(rank, step)


def all_cases() -> list[Case]:
    """The cases of every shipped recipe; those of equal sizes once, under the recipe that comes first."""
    cases: dict[str, Case] = {}
    for recipe in RECIPES:
        for case in rank_cases(Rank.of(recipe)):
            cases.setdefault(case.key, case)
    return list(cases.values())
