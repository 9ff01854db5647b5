# SPDX-License-Identifier: Apache-2.0
"""What the vendor documents about the MC2 kernels (MoE dispatch and combine): their limits, and the buffer they need.

Source: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_distribute_dispatch_v2.md and .._combine_v2.md, as of
commit 04f7867; read, not tried on a card. The numbers are those of the communication algorithm that ``comm_alg=""``
selects: "fullmesh" on A2 (with HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE unset), "fullmesh_v1" on A3. The pages
list no other product. A bound on A3, at most 2048 experts over all ranks, follows from the one on their number.
"""

from collections.abc import Collection
from dataclasses import dataclass

MOST_EXPERTS = 1024
MOST_TOP_K = 16
REFERENCE = "cpu"

_MIB = 1 << 20
_ITEM = 2  # bytes of bf16 and fp16, which is all that the kernels take


@dataclass(frozen=True, kw_only=True)
class Limits:
    """
    Attributes:
        hidden_sizes, tokens, ep_sizes: what is legal; tokens of one rank in a step.
        send_weights: dispatch takes the routing weights too, for ``expand_scales``, which combine demands.
    """

    hidden_sizes: range
    tokens: range
    ep_sizes: Collection[int]
    send_weights: bool


LIMITS = {
    "a2": Limits(
        hidden_sizes=range(32, 7168 + 1, 32),
        tokens=range(1, 256 + 1),
        ep_sizes=(2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256),
        send_weights=True,
    ),
    "a3": Limits(
        hidden_sizes=range(1024, 8192 + 1),
        tokens=range(1, 512 + 1),
        ep_sizes=range(2, 768 + 1),
        send_weights=False,
    ),
}


def refusal(
    product: str | None,
    *,
    hidden_size: int,
    tokens: int,
    top_k: int,
    num_experts: int,
    moe_ep: int,
    moe_tp: int,
) -> str | None:
    """The first limit that is broken, with what is legal, as one phrase; None if the kernels can be used.

    Args:
        product: ``a2``, ``a3`` or another product's name; ``cpu`` or None for the reference kernels, which have the
            limits that are in the arithmetic only.
        tokens: of one rank in a step.
    """
    if moe_tp != 1:
        # ranks that share experts would bring tokens of several ranks behind each other, and the active ones have to
        # come first
        return f"moe_tp_size={moe_tp} is not 1"
    if num_experts % moe_ep:
        return f"num_experts={num_experts} is not a multiple of moe_ep_size={moe_ep}"
    if top_k > num_experts:
        return f"top_k={top_k} exceeds num_experts={num_experts}"
    if product in (None, REFERENCE):
        return None
    limits = LIMITS.get(str(product))
    if limits is None:
        return f"documented for {' and '.join(LIMITS)} only, not for {product}"
    for name, value, legal in (
        ("hidden_size", hidden_size, limits.hidden_sizes),
        ("tokens per rank", tokens, limits.tokens),
        ("moe_ep_size", moe_ep, limits.ep_sizes),
        ("top_k", top_k, range(1, MOST_TOP_K + 1)),
        ("num_experts", num_experts, range(1, MOST_EXPERTS + 1)),
    ):
        if value not in legal:
            return f"{name}={value} is not in {_words(legal)} ({product})"
    return None


def buffer_bytes(product: str, *, hidden_size: int, tokens: int, top_k: int, num_experts: int, moe_ep: int) -> int:
    """The least that HCCL_BUFFSIZE (in MiB, 200 if it is not set) may be for the kernels' communicator, in bytes.

    HCCL allocates twice that per communicator, one part to send and one to receive. ``tokens`` of the rank that has
    most. Without shared experts. Raises ValueError for a product without a documented formula.
    """
    local, rows = num_experts // moe_ep, tokens * moe_ep
    match product:
        case "a2":
            return 2 * (rows * min(local, top_k) * hidden_size * _ITEM + 2 * _MIB)
        case "a3":
            row = hidden_size * _ITEM
            there = local * rows * _aligned(_aligned(row, 32) + 64, 512)  # a row and where it came from
            back = top_k * tokens * _aligned(row, 512)
            return 2 * (there + back)
    raise ValueError(f"no formula for product {product!r}; there is one for {', '.join(LIMITS)}")


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _words(legal: Collection[int]) -> str:
    if not isinstance(legal, range):
        return ", ".join(map(str, legal))
    return f"{legal[0]}..{legal[-1]}" + (f" in steps of {legal.step}" if legal.step > 1 else "")
