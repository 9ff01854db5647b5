# SPDX-License-Identifier: Apache-2.0
"""Reference kernels of the router: logits to the top-k expert ids and their weights.

Probabilities are computed in fp32 and cast once to the logits' dtype (fp64 logits in fp64, a reference-only
extension). Selection is a stable descending sort, so the lower expert id wins a tie.

Shape letters: T tokens, E experts, K selected experts per token.
"""

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define("npu_moe_gating_top_k_softmax", "(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)")

define(
    "npu_moe_gating_top_k_softmax_v2",
    "(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, bool? output_softmax=False)"
    " -> (Tensor, Tensor, Tensor)",
)

define(
    "npu_moe_gating_top_k",
    "(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, int k_group=1,"
    " int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False,"
    " float routed_scaling_factor=1., float eps=9.9999999999999995e-21) -> (Tensor, Tensor, Tensor)",
)

# norm_type of npu_moe_gating_top_k
_SOFTMAX, _SIGMOID = 0, 1

_Triple = tuple[Tensor, Tensor, Tensor]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _select(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest ``scores [..., E]`` and their indices, descending, the lower index first in a tie."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), ids[..., :k].contiguous()


def _int32_ids(ids: Tensor, finished: Tensor | None, experts: int) -> Tensor:
    """``finished`` tokens get the id E, which no routing operator takes for an expert."""
    ids = ids.to(torch.int32)
    return ids if finished is None else ids.masked_fill(finished.bool().unsqueeze(-1), experts)


def _check(x: Tensor, k: int, dims: tuple[int, ...]) -> None:
    torch._check(x.dim() in dims, lambda: f"moe gating: x must have {dims} dims, not shape {tuple(x.shape)}")
    torch._check(1 <= k <= x.shape[-1], lambda: f"moe gating: k must be in 1..{x.shape[-1]}, not {k}")


@reference("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> _Triple:
    """Softmax, then top-k; the weights are NOT renormalised.

    ``x [T, E]`` or ``[A, B, E]``; ``finished [T]`` bool. Returns weights ``[T, K]`` in x's dtype, ids
    ``[T, K]`` int32 and ``row_idx [T, K]`` int32 with ``row_idx[i, j] = j*T + i``, the column family's flat index.
    """
    _check(x, k, (2, 3))
    weights, ids = _select(_wide(x).softmax(-1), k)
    tokens = x.shape[:-1].numel()
    row_idx = torch.arange(tokens * k, dtype=torch.int32, device=x.device).view(k, tokens).t()
    return (
        weights.to(x.dtype),
        _int32_ids(ids, finished, x.shape[-1]),
        row_idx.reshape(ids.shape).contiguous(),
    )


@meta("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax_meta(x: Tensor, finished: Tensor | None = None, k: int = 1) -> _Triple:
    _check(x, k, (2, 3))
    shape = (*x.shape[:-1], k)
    ids = x.new_empty(shape, dtype=torch.int32)
    return x.new_empty(shape), ids, torch.empty_like(ids)


@reference("npu_moe_gating_top_k_softmax_v2")
def gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> _Triple:
    """As v1 without the index (``renorm=0``), or top-k of the logits, then a softmax of those (``renorm=1``).

    The second form equals softmax, top-k, renormalise: the common factor exp(-max)/sum cancels. Returns
    weights and ids as v1, and the full softmax fp32 ``x.shape`` if asked with ``renorm=0``, else an empty
    ``(0,)``. (For 3-D x torch_npu 2.13.0's own Meta kernel forgets the last dimension of that output.)
    """
    _check(x, k, (2, 3))
    logits = _wide(x)
    if renorm:
        kept, ids = _select(logits, k)
        weights = kept.softmax(-1)
    else:
        probabilities = logits.softmax(-1)
        weights, ids = _select(probabilities, k)
    full = probabilities.float() if output_softmax and not renorm else x.new_empty(0, dtype=torch.float32)
    return weights.to(x.dtype), _int32_ids(ids, finished, x.shape[-1]), full


@meta("npu_moe_gating_top_k_softmax_v2")
def gating_top_k_softmax_v2_meta(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> _Triple:
    _check(x, k, (2, 3))
    shape = (*x.shape[:-1], k)
    full = x.new_empty(x.shape if output_softmax and not renorm else (0,), dtype=torch.float32)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), full


@reference("npu_moe_gating_top_k")
def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> _Triple:
    """Softmax or sigmoid scores, a bias for the selection only, top-k, renormalise, scale.

    ``x [T, E]``, ``bias [E]``. Returns weights ``[T, K]`` in x's dtype, ids ``[T, K]`` int32 and the unbiased
    scores fp32 ``[T, E]``, whose contents exist only with ``out_flag`` (NaN here otherwise). Sigmoid weights
    are always renormalised, as in the vendor's test golden; softmax ones with ``renorm=1``, which the
    operator's page refuses and the newer V2 documentation allows. NotImplementedError for expert groups and
    hashed routing.
    """
    _check_one_group(x, k, bias, input_ids, tid2eid, k_group, group_count, norm_type)
    scores = _wide(x).softmax(-1) if norm_type == _SOFTMAX else _wide(x).sigmoid()
    _, ids = _select(scores if bias is None else scores + bias.to(scores.dtype), k)
    weights = scores.gather(-1, ids)
    if renorm or norm_type == _SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    full = scores.float() if out_flag else torch.full_like(scores, float("nan"), dtype=torch.float32)
    return (weights * routed_scaling_factor).to(x.dtype), ids.to(torch.int32), full


@meta("npu_moe_gating_top_k")
def gating_top_k_meta(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> _Triple:
    _check_one_group(x, k, bias, input_ids, tid2eid, k_group, group_count, norm_type)
    shape = (x.shape[0], k)
    return (
        x.new_empty(shape),
        x.new_empty(shape, dtype=torch.int32),
        x.new_empty(x.shape, dtype=torch.float32),
    )


def _check_one_group(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    k_group: int,
    group_count: int,
    norm_type: int,
) -> None:
    _check(x, k, (2,))
    torch._check(
        bias is None or bias.shape == x.shape[1:],
        lambda: f"npu_moe_gating_top_k: bias must be ({x.shape[1]},)",
    )
    if input_ids is not None or tid2eid is not None:
        raise NotImplementedError("npu_moe_gating_top_k reference: input_ids and tid2eid (hashed routing)")
    if (k_group, group_count) != (1, 1):
        raise NotImplementedError(f"npu_moe_gating_top_k reference: {k_group=}, {group_count=} (expert groups)")
    if norm_type not in (_SOFTMAX, _SIGMOID):
        raise NotImplementedError(f"npu_moe_gating_top_k reference: {norm_type=}, only 0 softmax and 1 sigmoid")
