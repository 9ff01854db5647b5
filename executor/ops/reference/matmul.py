# SPDX-License-Identifier: Apache-2.0
"""Reference kernels of SwiGLU and of the grouped matmul that runs every expert of an MoE layer in one call.

Half precisions are computed with fp32 accumulation and rounded once. fp32 and fp64 inputs are computed in
their own dtype; fp64 is a reference-only extension, so that parity tests can be exact.
"""

import torch
from torch import Tensor

from executor.ops.schemas import define, meta, reference

define("npu_swiglu", "(Tensor input, int dim=-1) -> Tensor")

define(
    "npu_grouped_matmul",
    "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None,"
    " Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None,"
    " Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None,"
    " Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None,"
    " int? group_list_type=0, int? act_type=0, int[]? tuning_config=None,"
    " int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None,"
    " int? per_token_scale_dtype=None) -> Tensor[]",
)

# group_list_type
_CUMULATIVE, _COUNTS, _PAIRS = 0, 1, 2

# output_dtype codes: torch's own ScalarType numbers, so a torch.dtype argument arrives as one of these
_FLOAT_OF_CODE = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@reference("npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(first half of dim) * second half``, in fp32 with one final cast: that dim is halved."""
    _check_even(input, dim)
    gate, up = input.to(_wide(input.dtype)).chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


@meta("npu_swiglu")
def swiglu_meta(input: Tensor, dim: int = -1) -> Tensor:
    _check_even(input, dim)
    shape = list(input.shape)
    shape[dim] //= 2
    return input.new_empty(shape)


def _check_even(input: Tensor, dim: int) -> None:
    torch._check(input.shape[dim] % 2 == 0, lambda: f"npu_swiglu: dim {dim} of {tuple(input.shape)} must be even")


@reference("npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    tuning_config: list[int] | None = None,  # a tiling hint: no effect on the result
    output_dtype: int | None = None,
    **unsupported: object,
) -> list[Tensor]:
    """Rows of ``x``, grouped by expert, times that expert's matrix. The MoE form for float dtypes only.

    ``x=[X (M, K)]``; ``weight=[W (E, K, N)]`` or E tensors ``(K, N)``, of any strides; ``bias=[(E, N)]`` or E
    tensors ``(N,)``; ``group_list`` int64: cumulative ends (type 0) or counts (type 1) ``(E,)``, or
    ``(G, 2)`` pairs of expert id and count ended by a zero count (type 2). Returns ``[Y (M, N)]`` in x's dtype or
    ``output_dtype``. Rows past the covered range are undefined on the device and NaN here. RuntimeError for
    malformed groups, NotImplementedError for the quantised forms.
    """
    dtype = _check_moe_form(x, weight, split_item, group_type, group_list_type, output_dtype, unsupported)
    torch._check(group_list is not None, lambda: "npu_grouped_matmul: group_list must be given")
    rows, matrices = x[0], _per_expert(weight)
    biases = None if not bias else _per_expert(bias, matrix_dims=1)
    y = rows.new_empty(rows.shape[0], weight[0].shape[-1], dtype=dtype)
    begin = 0
    for expert, count in _nonempty_groups(group_list, group_list_type, len(matrices), rows.shape[0]):
        end = begin + count
        y[begin:end] = _matmul(rows[begin:end], matrices[expert], None if biases is None else biases[expert], dtype)
        begin = end
    y[begin:] = float("nan")
    return [y]


@meta("npu_grouped_matmul")
def grouped_matmul_meta(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    **unsupported: object,
) -> list[Tensor]:
    dtype = _check_moe_form(x, weight, split_item, group_type, group_list_type, output_dtype, unsupported)
    return [x[0].new_empty((x[0].shape[0], weight[0].shape[-1]), dtype=dtype)]


def _matmul(x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(m, K) @ (K, N) (+ bias)`` in ``dtype``, rounded once.

    The bf16 CPU kernel already accumulates in fp32 and rounds once, for both storage orders of ``w``, and
    reads half the bytes of an fp32 copy. fp16 takes the copy: its CPU kernel is about ten times slower when N
    is the unit stride.
    """
    if bias is None and dtype == x.dtype != torch.float16:
        return torch.mm(x, w)
    wide = _wide(x.dtype)
    y = torch.mm(x.to(wide), w.to(wide))
    return (y if bias is None else y + bias.to(wide)).to(dtype)


def _per_expert(tensors: list[Tensor], matrix_dims: int = 2) -> list[Tensor] | Tensor:
    """One stacked tensor or a list of them, either way something ``[expert]`` indexes."""
    return tensors[0] if len(tensors) == 1 and tensors[0].dim() == matrix_dims + 1 else tensors


def _nonempty_groups(
    group_list: Tensor | None, group_list_type: int | None, experts: int, rows: int
) -> list[tuple[int, int]]:
    """(expert, row count) of the groups that have rows, in row order. RuntimeError if they cannot be."""
    values = [] if group_list is None else group_list.tolist()
    if group_list_type == _PAIRS:
        ended = next((i for i, (_, count) in enumerate(values) if count == 0), len(values))
        groups = [(expert, count) for expert, count in values[:ended]]
    else:
        torch._check(
            len(values) == experts,
            lambda: f"npu_grouped_matmul: group_list has {len(values)} entries for {experts} experts",
        )
        starts = [0, *values[:-1]] if group_list_type == _CUMULATIVE else [0] * experts
        groups = [(e, v - s) for e, (v, s) in enumerate(zip(values, starts)) if v != s]
    covered = sum(count for _, count in groups)
    torch._check(
        covered <= rows and all(count > 0 and 0 <= expert < experts for expert, count in groups),
        lambda: (
            f"npu_grouped_matmul: group_list {values} (type {group_list_type}) does not fit {rows} rows"
            f" and {experts} experts"
        ),
    )
    return groups


def _check_moe_form(
    x: list[Tensor],
    weight: list[Tensor],
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    output_dtype: int | None,
    unsupported: dict[str, object],
) -> torch.dtype:
    """Refuse what this reference does not compute; return the output dtype."""
    # leaving group_type at its default None is an error in the vendor's kernel too, a trap worth keeping
    torch._check(
        group_type in (-1, 0, 2),
        lambda: f"npu_grouped_matmul: group_type only supports -1, 0 and 2, but got {group_type}",
    )
    torch._check(
        group_list_type in (_CUMULATIVE, _COUNTS, _PAIRS),
        lambda: f"npu_grouped_matmul: group_list_type only supports 0, 1 and 2, but got {group_list_type}",
    )
    for name, value in unsupported.items():
        if value not in (None, [], 0):
            raise NotImplementedError(f"npu_grouped_matmul reference: argument {name} (quantised forms)")
    if group_type != 0 or split_item not in (2, 3) or len(x) != 1:
        raise NotImplementedError(
            f"npu_grouped_matmul reference: only one x, group_type 0 and split_item 2 or 3, not {len(x)} x,"
            f" group_type {group_type} and split_item {split_item}"
        )
    rows, w = x[0], weight[0]
    if rows.dtype not in _FLOAT_OF_CODE.values():
        raise NotImplementedError(f"npu_grouped_matmul reference: x of dtype {rows.dtype} (quantised forms)")
    if output_dtype is not None and output_dtype not in _FLOAT_OF_CODE:
        raise NotImplementedError(f"npu_grouped_matmul reference: output_dtype {output_dtype} (quantised forms)")
    stacked = len(weight) == 1 and w.dim() == 3
    torch._check(
        rows.dim() == 2 and (stacked or all(m.dim() == 2 for m in weight)) and rows.shape[1] == w.shape[-2],
        lambda: f"npu_grouped_matmul: x {tuple(rows.shape)} does not multiply weight {tuple(w.shape)}",
    )
    torch._check(
        all(m.dtype == rows.dtype for m in weight),
        lambda: f"npu_grouped_matmul: weight of dtype {w.dtype} with x of dtype {rows.dtype}",
    )
    return rows.dtype if output_dtype is None else _FLOAT_OF_CODE[output_dtype]
