"""Grouped GEMMs of 8-bit matrices: one for each expert, over rows that are sorted by expert.

Every operand has one scale per row or column of each expert, so an expert with small numbers keeps its precision.

On CPU, and to emulate, one operator loops over the experts. On a GPU it runs a kernel of `kernels.gemm_triton`.

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer, C columns.
`ends`: (E,) int32, the end of each expert's rows.
"""

from collections.abc import Callable

import torch

from torchtitan.device import HAS_TRITON
from torchtitan.kernels import quantize, rounding
from torchtitan.kernels.dispatch import KERNELS, Kernel, find_kernel
from torchtitan.kernels.grouped_gemm import ALIGNMENT, rows_of
from torchtitan.kernels.matmul_8bit import matmul
from torchtitan.kernels.operator import operator
from torchtitan.kernels.quantize import Quantized, scale_inverse_of
from torchtitan.kernels.rounding import on_cpu
from torchtitan.registry import deferred

_grouped_gemm: Callable[..., torch.Tensor] = deferred("torchtitan.kernels.gemm_triton:grouped_gemm")
_grouped_gemm_over_rows: Callable[..., torch.Tensor] = deferred("torchtitan.kernels.gemm_triton:grouped_gemm_over_rows")
RoundedBoth = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_round_both: Callable[..., RoundedBoth] = deferred("torchtitan.kernels.rounding_triton:round_both")


def round_expert_rows(x: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """Rounds (..., C) to int8 or float8 with one scale per row: (..., C) and (..., 1)."""
    rows = x.flatten(0, -2)
    scale_inverse = scale_inverse_of(rounding.amax(rows), dtype)
    data = rounding.round_to(rows, scale_inverse.reciprocal(), dtype)
    return Quantized(data.view(x.shape), scale_inverse.view(*x.shape[:-1], 1))


def round_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[Quantized, torch.Tensor | None]:
    """`round_expert_rows` of (E, N, K); on a GPU also the scale inverses of `round_columns`, without another pass."""
    if on_cpu(weight):
        return round_expert_rows(weight, dtype), None
    return quantize.round_rows(weight, dtype)


def round_columns(weight: torch.Tensor, dtype: torch.dtype, scale_inverse: torch.Tensor | None = None) -> Quantized:
    """Rounds (E, N, K) with one scale per column of each expert: (E, N, K) and (E, 1, K)."""
    if scale_inverse is None and not on_cpu(weight):
        scale_inverse = scale_inverse_of(weight.abs().amax(1, keepdim=True).float(), dtype)
    if scale_inverse is not None:
        return Quantized(rounding.round_to(weight, scale_inverse.reciprocal(), dtype), scale_inverse)
    data, scale_inverse = round_columns_of_rows(weight.flatten(0, 1), ends_of_matrices(weight), dtype)
    return Quantized(data.view(weight.shape), scale_inverse.unsqueeze(1))


def round_columns_of_rows(x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """Rounds (M, C) with one scale per column of each expert's rows: (M, C) and (E, C)."""
    return Quantized(*find_kernel("rounding of experts' columns", x)(x, ends, dtype))


def _round_columns_by_torch(
    x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    expert = expert_of_rows(ends, x.shape[0])
    # Rows after the last end, of a padded matrix, belong to no expert.
    amax = x.new_zeros(ends.shape[0] + 1, x.shape[1], dtype=torch.float32)
    amax.scatter_reduce_(0, expert.unsqueeze(1).expand_as(x), x.abs().float(), "amax")
    scale_inverse = scale_inverse_of(amax, dtype)
    data = rounding.round_to(x, scale_inverse.reciprocal()[expert], dtype)
    return data, scale_inverse[:-1]


def round_rows_and_columns(
    x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype, emulate: bool = False
) -> tuple[Quantized, Quantized, torch.Tensor]:
    """Rounds the operand x, (M, C), of two grouped GEMMs: one over its columns, one over its rows. Returns
    `round_rows(x)`, `round_columns_of_rows(x)`, and the ends of the experts' rows in the latter, which are filled up on
    a GPU (`pad_groups`)."""
    by_expert = _round_both_unpadded if emulate else find_kernel("rounding of experts' rows and columns", x)
    rows, row_scale_inverse, columns, column_scale_inverse, ends = by_expert(x, ends, dtype)
    return Quantized(rows, row_scale_inverse), Quantized(columns, column_scale_inverse), ends


def _round_both_unpadded(x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> RoundedBoth:
    return *round_expert_rows(x, dtype), *round_columns_of_rows(x, ends, dtype), ends


def _round_both_padded(x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> RoundedBoth:
    padded, padded_ends = pad_groups(x, ends, ALIGNMENT)
    return *round_expert_rows(x, dtype), *round_columns_of_rows(padded, padded_ends, dtype), padded_ends


WIDENS = 2  # a layer with more outputs than so many times its inputs takes part in SwiGLU


def round_gradient(x: torch.Tensor, inputs: int, dtype: torch.dtype) -> tuple[Quantized, Quantized]:
    """Rounds the gradient of a linear layer's output with `round_matrix`: otherwise the compiler computes it again for
    each of the scales, or keeps it in float32. It computes the two gradients of SwiGLU in one pass, without that."""
    return round_matrix(x, dtype) if x.shape[1] <= WIDENS * inputs else quantize.quantize_both(x, "rowwise", dtype)


def round_matrix(x: torch.Tensor, dtype: torch.dtype) -> tuple[Quantized, Quantized]:
    """Rounds (M, C) with one scale per row, and with one per column; on a GPU by the kernels for experts, as if
    there were one."""
    if not quantize.has_triton_kernels(x, dtype):
        return quantize.quantize_both(x, "rowwise", dtype)
    ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    by_row, by_column, _ = round_rows_and_columns(x, ends, dtype)
    return by_row, Quantized(by_column.data[: x.shape[0]], by_column.scale_inverse)


def round_experts(weight: torch.Tensor, dtype: torch.dtype) -> tuple[Quantized, Quantized]:
    """`round_weight` and `round_columns` of (E, N, K). N is a multiple of ALIGNMENT, so no rows are filled up."""
    by_row, by_column, _ = round_rows_and_columns(weight.flatten(0, 1), ends_of_matrices(weight), dtype)
    (rows, row_scales), columns = by_row, by_column.data[: by_row.data.shape[0]]
    return (
        Quantized(rows.view(weight.shape), row_scales.view(*weight.shape[:2], 1)),
        Quantized(columns.unflatten(0, weight.shape[:2]), by_column.scale_inverse.unsqueeze(1)),
    )


def ends_of_matrices(weight: torch.Tensor) -> torch.Tensor:
    """(E,) int32: where the rows of each expert's matrix end in those of (E, N, K)."""
    experts, rows, _ = weight.shape
    return torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=weight.device)


def expert_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows,) int64: the expert of each row; E after the last end."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


def pad_groups(x: torch.Tensor, ends: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each expert, filled up with zeros to a multiple of `multiple`, and their ends. The size does not
    depend on `ends`, so that the host need not wait for the device: there are zeros at the end, too."""
    rows, counts = x.shape[0], ends.diff(prepend=ends.new_zeros(1))
    padded_ends = ((counts + multiple - 1) // multiple * multiple).cumsum(0).to(torch.int32)
    shift = torch.cat([ends.new_zeros(1), padded_ends[:-1] - ends[:-1]])
    position = torch.arange(rows, device=x.device)
    place = position + shift[expert_of_rows(ends, rows)]
    size = _padded_rows(rows, ends.shape[0], multiple)
    return x.new_zeros(size, x.shape[1]).index_copy(0, place, x), padded_ends


def _padded_rows(rows: int, experts: int, multiple: int) -> int:
    """The most rows that padding may lead to; of one expert, the only number."""
    return (rows + experts * (multiple - 1)) // multiple * multiple


def grouped_matmul(
    a: Quantized, b: Quantized, ends: torch.Tensor | None, dtype: torch.dtype, emulate: bool = False, fast: bool = False
) -> torch.Tensor:
    """(M, K) x (E, K, N) to (M, N): the rows of expert e times b[e]; without `ends`, a times the only b. Scale inverses
    are (M, 1) and (E, 1, N). `emulate` and `fast`: see `matmul_8bit.float8_matmul`."""
    if ends is None:
        return matmul(a, b, dtype, emulate, fast)
    right = b.data
    if not (emulate or on_cpu(right)):
        right = right.transpose(1, 2).contiguous().transpose(1, 2)  # here the compiler fuses it with the rounding
    return grouped_8bit_mm(*a, right, b.scale_inverse, ends, dtype, emulate, fast)


def grouped_matmul_over_rows(
    a: Quantized, b: Quantized, ends: torch.Tensor | None, dtype: torch.dtype, emulate: bool = False
) -> torch.Tensor:
    """(M, N) and (M, K), with scale inverses (E, N) and (E, K), to (E, N, K): a.T @ b over the rows of each expert. On
    a GPU, the ends are multiples of ALIGNMENT. Without `ends`, (N, K)."""
    if ends is None:
        return matmul(a.transpose(), b, dtype, emulate)
    return grouped_8bit_mm(*a, *b, ends, dtype, emulate, False)


def _empty_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[1], b.shape[1])
    return a.new_empty(shape, dtype=dtype)


# Operators, so that the compiler need not know how many rows an expert has.
@operator("grouped_8bit_mm", lambda a, _, b, __, ends, dtype, *more: _empty_product(a, b, ends, dtype))
def grouped_8bit_mm(
    a: torch.Tensor,
    a_scale_inverse: torch.Tensor,
    b: torch.Tensor,
    b_scale_inverse: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
    emulate: bool,
    fast: bool,
) -> torch.Tensor:
    """`grouped_matmul` if b is (E, K, N), `grouped_matmul_over_rows` if it is (M, K). On a GPU one kernel, otherwise a
    loop over the experts."""
    if HAS_TRITON and not (emulate or on_cpu(a)):
        operands = Quantized(a, a_scale_inverse), Quantized(b, b_scale_inverse)
        if b.dim() == 3:
            return _grouped_gemm(*operands, ends, dtype, fast)
        return _grouped_gemm_over_rows(*operands, ends, dtype)
    out = _empty_product(a, b, ends, dtype)
    for expert, rows in enumerate(rows_of(ends)):
        if b.dim() == 2 and rows.start == rows.stop:
            out[expert] = 0
        elif b.dim() == 2:
            left = Quantized(a[rows].t(), a_scale_inverse[expert].unsqueeze(1))
            out[expert] = matmul(left, Quantized(b[rows], b_scale_inverse[expert].unsqueeze(0)), dtype, emulate)
        elif rows.start < rows.stop:
            left = Quantized(a[rows], a_scale_inverse[rows])
            out[rows] = matmul(left, Quantized(b[expert], b_scale_inverse[expert]), dtype, emulate)
    return out


def _empty_columns(x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty(ends.shape[0], x.shape[1], dtype=torch.float32)


@operator("round_columns_of_rows", _empty_columns)
def _round_columns_cpu(x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale_inverse = _empty_columns(x, ends, dtype)
    scale_inverse.fill_(1)
    for expert, rows in enumerate(rows_of(ends)):
        if rows.start < rows.stop:
            inverse = scale_inverse_of(rounding.amax_both(x[rows])[1], dtype)
            scale_inverse[expert] = inverse
            data[rows] = rounding.round_to(x[rows], inverse.reciprocal(), dtype)
    return data, scale_inverse


def _empty_both(
    x: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype, source: torch.Tensor | None = None, *_: object
) -> tuple[torch.Tensor, ...]:
    (rows, columns), experts = x.shape, ends.shape[0]
    rows = rows if source is None else source.shape[0]
    padded = x.new_empty(columns, _padded_rows(rows, experts, ALIGNMENT), dtype=dtype).t()
    scales = (x.new_empty(rows, 1, dtype=torch.float32), x.new_empty(experts, columns, dtype=torch.float32))
    return x.new_empty(rows, columns, dtype=dtype), scales[0], padded, scales[1], torch.empty_like(ends)


@operator("round_rows_and_columns", _empty_both)
def _round_both_triton(
    x: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
    source: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> RoundedBoth:
    """Of x; of x[source], and of that times factor.unsqueeze(1) (`compiler_passes.py`)."""
    rows = _padded_rows((x if source is None else source).shape[0], ends.shape[0], ALIGNMENT)
    return _round_both(x.contiguous(), ends, rows, dtype, source, factor)


KERNELS["rounding of experts' columns"] = [
    Kernel("rounding.cpp", _round_columns_cpu, on_cpu),
    Kernel("torch's", _round_columns_by_torch),
]
KERNELS["rounding of experts' rows and columns"] = [
    Kernel("rounding.cpp", _round_both_unpadded, on_cpu),
    Kernel("rounding_triton.py", _round_both_triton, lambda x: HAS_TRITON),
    Kernel("torch's", _round_both_padded),
]
