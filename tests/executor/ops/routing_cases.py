# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of the MoE tests: random tensors, and tokens routed to experts in every awkward way."""

import torch
from hypothesis import strategies as st


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_ids(tokens, experts, top_k, seed):
    """K different experts per token, as a router gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32)


@st.composite
def routed(draw, max_tokens=7):
    """x [T, H], ids [T, K] (random, or all tokens on the same experts), E and a range of experts, maybe silent."""
    tokens, experts = draw(st.integers(1, max_tokens)), draw(st.integers(1, 10))
    top_k, seed = draw(st.integers(1, experts)), draw(st.integers(0, 999))
    ids = random_ids(tokens, experts, top_k, seed)
    if draw(st.booleans()):
        ids = ids[:1].expand(tokens, top_k).contiguous()
    start = draw(st.integers(0, experts - 1))
    end = draw(st.integers(start + 1, experts))
    return rand(tokens, 3, seed=seed), ids, experts, (start, end)
