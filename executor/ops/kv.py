# SPDX-License-Identifier: Apache-2.0
"""Writing new keys and values into the paged cache.

T: tokens.  Nk: KV heads.  D: head dim.  A slot is ``block * block_size + offset``.
"""

import torch
from torch import Tensor

CACHE_MODE_NORM = "Norm"  # caches as [num_blocks, block_size, Nk, D]; the operator's own default is the NZ format


def write_kv(k_TND: Tensor, v_TND: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """Write T tokens into their slots, in place, with one kernel.

    Args:
        k_TND, v_TND: [T, Nk, D], in the dtype of the caches.
        k_cache, v_cache: [num_blocks, block_size, Nk, D].
        slots_T: int32 or int64 [T], unique.

    Raises:
        ValueError: a shape, dtype or slot that does not fit.
    """
    torch.ops.npu.npu_scatter_pa_kv_cache(k_TND, v_TND, k_cache, v_cache, slots_T, cache_mode=CACHE_MODE_NORM)


def write_kv_unfused(k_TND: Tensor, v_TND: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """``write_kv`` with one scatter per cache, which npugraph_ex keeps in place without extra registration.

    Caches must be contiguous over [num_blocks, block_size]; every slot must be >= 0.
    """
    index_T1 = slots_T.view(-1, 1)
    torch.ops.npu.npu_scatter_nd_update_(k_cache.view(-1, *k_cache.shape[2:]), index_T1, k_TND)
    torch.ops.npu.npu_scatter_nd_update_(v_cache.view(-1, *v_cache.shape[2:]), index_T1, v_TND)
