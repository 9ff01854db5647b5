# SPDX-License-Identifier: Apache-2.0
"""The documented limits of the MC2 kernels: the ends of every range, and the buffer formula counted row by row."""

import pytest
import torch

import executor.ops.reference  # noqa: F401  registers the kernels
from executor.moe.mc2_limits import LIMITS, buffer_bytes, refusal

LEGAL = dict(hidden_size=4096, tokens=64, top_k=8, num_experts=128, moe_ep=16, moe_tp=1)

# product, key, values at the ends of what is legal, values just past them
ENDS = [
    ("a2", "hidden_size", (32, 7168), (0, 31, 33, 7167, 7200)),
    ("a2", "tokens", (1, 256), (0, 257)),
    ("a3", "hidden_size", (1024, 1025, 8192), (1023, 8193)),
    ("a3", "tokens", (1, 512), (0, 513)),
    ("a2", "moe_ep", (2, 4, 8, 16, 32, 64, 128), (1,)),
    ("a3", "moe_ep", (2, 4, 8, 16, 32, 64, 128), (1,)),
    ("a2", "top_k", (1, 16), (0, 17)),
    ("a3", "top_k", (1, 16), (0, 17)),
    ("a2", "num_experts", (16, 1024), (1040,)),
    ("a3", "num_experts", (16, 1024), (1040,)),
]
NAMES = {"tokens": "tokens per rank", "moe_ep": "moe_ep_size"}


@pytest.mark.parametrize(("product", "key", "legal", "past"), ENDS)
def test_the_ends_of_every_range(product, key, legal, past):
    for value in legal:
        assert refusal(product, **{**LEGAL, key: value}) is None
    for value in past:
        phrase = refusal(product, **{**LEGAL, key: value})
        assert phrase is not None
        assert phrase.startswith(f"{NAMES.get(key, key)}={value} is not in ")
        assert "\n" not in phrase


def test_sizes_of_the_communicator():
    wide = {**LEGAL, "num_experts": 768}
    assert refusal("a3", **{**wide, "moe_ep": 768}) is None
    assert refusal("a3", **{**LEGAL, "num_experts": 769, "moe_ep": 769}) == "moe_ep_size=769 is not in 2..768 (a3)"
    assert "moe_ep_size=12 is not in 2, 3, 4" in refusal("a2", **{**wide, "moe_ep": 12})  # between two servers


@pytest.mark.parametrize("product", ["a2", "a3", "950", "cpu", None])
def test_what_no_product_can_do(product):
    assert refusal(product, **{**LEGAL, "moe_tp": 2}) == "moe_tp_size=2 is not 1"
    assert "num_experts=128 is not a multiple of moe_ep_size=3" in refusal(product, **{**LEGAL, "moe_ep": 3})
    assert "top_k=17 exceeds num_experts=16" in refusal(product, **{**LEGAL, "num_experts": 16, "top_k": 17})


def test_reference_kernels_have_no_other_limits_and_other_products_no_kernels():
    tiny = {**LEGAL, "hidden_size": 7, "tokens": 10**6, "num_experts": 4096, "top_k": 32, "moe_ep": 1}
    assert refusal("cpu", **tiny) is refusal(None, **tiny) is None
    assert "not for 950" in refusal("950", **LEGAL)


def padded(size, to):
    while size % to:
        size += 1
    return size


@pytest.mark.parametrize(("tokens", "hidden", "top_k", "ep"), [(3, 4096, 8, 16), (5, 1056, 2, 8), (1, 7168, 16, 64)])
def test_buffer_counted_row_by_row(tokens, hidden, top_k, ep):
    sizes = dict(hidden_size=hidden, tokens=tokens, top_k=top_k, num_experts=128, moe_ep=ep)
    there = sum(
        padded(padded(2 * hidden, 32) + 64, 512)
        for _expert in range(128 // ep)
        for _rank in range(ep)
        for _token in range(tokens)
    )
    back = sum(padded(2 * hidden, 512) for _choice in range(top_k) for _token in range(tokens))
    assert buffer_bytes("a3", **sizes) == 2 * (there + back)
    # on A2: the rows that may arrive, which are those of the operator's first output
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    rows = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "g", ep, 0, 128)[0]
    assert buffer_bytes("a2", **sizes) == 2 * (rows.numel() * rows.itemsize + 2 * 2**20)


def test_buffer_of_a_product_without_a_formula():
    sizes = {key: LEGAL[key] for key in ("hidden_size", "tokens", "top_k", "num_experts", "moe_ep")}
    with pytest.raises(ValueError, match="no formula for product '950'; there is one for a2, a3"):
        buffer_bytes("950", **sizes)
    assert set(LIMITS) == {"a2", "a3"}
