# SPDX-License-Identifier: Apache-2.0
"""The cases of a MoE layer: gate, routing, experts, sum. See ``case.py``.

T tokens, E experts of the model, K of them per token, L experts of this rank, H hidden size.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from executor.moe.block import MoeBlock
from executor.ops import matmul, moe
from tests.npu.case import DTYPE, Case, Normal
from tests.npu.compare import equal, rounded
from tests.npu.layer_cases import swiglu_case
from tests.npu.recipes import Rank, Step


def init_routing(
    x: Tensor, ids: Tensor, *, num_experts: int, span: tuple[int, int], placed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Without the rows behind the placed ones, which are undefined."""
    rows, row_idx, counts = moe.init_routing(x, ids, num_experts, span)
    return rows[:placed], row_idx, counts


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, *, placed: int) -> Tensor:
    """As above."""
    return matmul.grouped_matmul(x, weight, counts)[:placed]


def re_routing(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """There and back."""
    there, source, totals = moe.re_routing(rows, counts)
    return there, source, totals, moe.undo_re_routing(there, source)


def distinct_logits(tokens: int, experts: int) -> Tensor:
    """Rows without a tie: different 64ths from -4 to 4, all of which bfloat16 holds."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(tokens, 512, generator=generator).argsort(-1)[:, :experts]
    return ((numbers - 256) / 64).to(DTYPE)


def moe_cases(rank: Rank, step: Step, block: MoeBlock) -> Iterator[Case]:
    gate, experts = block.gate, block.experts
    tokens, num_experts, top_k = step.tokens, gate.num_experts, gate.top_k
    local, hidden, width = experts.w2.shape[0], experts.w2.shape[2], experts.w2.shape[1]

    def case(operator: str, call: partial, given: tuple, rules: tuple) -> Case:
        return Case(rank.recipe, operator, step.name, call, given, rules)

    logits = {"": Normal((tokens, num_experts)), " without ties": distinct_logits(tokens, num_experts)}
    for call in (moe.gate_topk, moe.gate_topk_unfused):
        bound = partial(call, top_k=top_k, renormalize=gate.renormalize)
        for what, x in logits.items():
            yield case(call.__name__ + what, bound, (x,), (rounded, equal))

    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, generator=generator).softmax(-1).to(DTYPE)
    x, rows = Normal((tokens, hidden)), tokens * top_k
    spans = {"all experts": (0, num_experts), "this rank's experts": (experts.mine.start, experts.mine.stop)}
    for what, span in spans.items() if local < num_experts else list(spans.items())[:1]:
        _, row_idx, counts = moe.init_routing(torch.zeros(tokens, 1), ids, num_experts, span)
        placed = int(counts.sum())
        bound = partial(init_routing, num_experts=num_experts, span=span, placed=placed)
        yield case(f"init_routing to {what}", bound, (x, ids), (equal, equal, equal))
        given = (Normal((rows, hidden)), weights, row_idx)
        yield case(f"finalize_routing of {what}", partial(moe.finalize_routing), given, (rounded,))

    # the counts of the last span, which is this rank's
    for name, weight in (("w13", experts.w13), ("w2", experts.w2)):
        inner = weight.shape[1]
        given = (Normal((rows, inner)), Normal(tuple(weight.shape), inner**-0.5), counts)
        yield case(f"grouped_matmul with {name}", partial(grouped_matmul, placed=placed), given, (rounded,))
    yield swiglu_case(rank, step, "the experts", rows, width)

    ranks = rank.plan.blueprint.groups.moe_ep.size
    if ranks > 1:
        received = torch.randint(0, 4, (ranks, local), generator=generator)
        for what, arriving in (("", received), (" with rows for all", received + 1)):
            given = (Normal((int(arriving.sum()), hidden)), arriving)
            yield case("re_routing" + what, partial(re_routing), given, (equal,) * 4)
