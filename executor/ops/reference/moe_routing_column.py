# SPDX-License-Identifier: Apache-2.0
"""Reference kernels of npu_moe_init_routing and npu_moe_compute_expert_tokens: the older, column family.

The copy (token i, slot j) has the flat index ``j*T + i``, which only npu_moe_finalize_routing with
drop_pad_mode 0 or 1 understands; ``moe_routing.py`` has the row family. Shape letters: T tokens, K copies per
token, H hidden size.
"""

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define(
    "npu_moe_init_routing",
    "(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)",
)

define("npu_moe_compute_expert_tokens", "(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor")


@reference("npu_moe_init_routing")
def init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Column family. ``x [T, H]``, ``row_idx`` and ``expert_idx [T, K]`` int32; ``active_num`` counts tokens.

    Returns the first ``min(T, active_num) * K`` rows of x in expert order, ``expanded_row_idx [T*K]`` int32
    (position of each flat copy, source to destination) and the sorted expert ids ``[T*K]`` int32.
    """
    rows = _check_init_routing(x, row_idx, expert_idx, active_num)
    sorted_ids, order = expert_idx.reshape(-1).sort(stable=True)
    source = row_idx.reshape(-1)[order].long()
    expanded_row_idx = torch.empty_like(source, dtype=torch.int32)
    expanded_row_idx[source] = torch.arange(source.numel(), dtype=torch.int32)
    return x[source[:rows] % max(x.shape[0], 1)], expanded_row_idx, sorted_ids


@meta("npu_moe_init_routing")
def init_routing_meta(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = _check_init_routing(x, row_idx, expert_idx, active_num)
    flat = row_idx.new_empty(expert_idx.numel(), dtype=torch.int32)
    return x.new_empty(rows, x.shape[1]), flat, torch.empty_like(flat)


def _check_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> int:
    torch._check(
        x.dim() == expert_idx.dim() == 2 and row_idx.shape == expert_idx.shape == (x.shape[0], row_idx.shape[-1]),
        lambda: (
            f"npu_moe_init_routing: x {tuple(x.shape)}, row_idx {tuple(row_idx.shape)} and expert_idx"
            f" {tuple(expert_idx.shape)} must be (T, H), (T, K) and (T, K)"
        ),
    )
    return min(x.shape[0], active_num) * expert_idx.shape[1]


@reference("npu_moe_compute_expert_tokens")
def compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """CUMULATIVE counts: for each expert e, how many sorted ids are at most e. int32 ``[num_expert]``."""
    experts = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    return torch.searchsorted(sorted_expert_for_source_row, experts, right=True, out_int32=True)


@meta("npu_moe_compute_expert_tokens")
def compute_expert_tokens_meta(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    return sorted_expert_for_source_row.new_empty(num_expert, dtype=torch.int32)
