"""The gradients of SwiGLU, rounded to 8 bits where they are computed, on NVIDIA GPUs, in Triton.

The compiler computes a row of them at a time. For sums over rows it writes the 8-bit numbers of a row one below the
other, and memory moves 32 bytes for each. Here a program computes a tile, and writes both its rows and its columns side
by side. Inputs are read twice, for the amaxes and to be rounded, and each 8-bit copy is written once.

Shapes: M tokens, C inner channels of a feed-forward layer.
"""

import torch
import triton
import triton.language as tl

from torchtitan.kernels.rounding_triton import TILE, constants_of, round_by

WARPS = 8  # three operands of a tile, and what is made of them, are in registers


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(M, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows and columns of this program's tile, and whether it is the first one of these rows, and of these columns."""
    tiles = tl.cdiv(C, COLUMNS)
    row, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    return row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS), column == 0, row == 0


@triton.jit
def derived(grad, gate, up, places, inside):  # type: ignore[no-untyped-def]
    """Of a tile, in float32: the gradients of gate and up, and silu(gate) * up."""
    grad = tl.load(grad + places, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate + places, mask=inside, other=0).to(tl.float32)
    up = tl.load(up + places, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid * (1 + gate * (1 - sigmoid))), grad * silu, silu * up


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_amax_kernel(  # type: ignore[no-untyped-def]
    grad, gate, up, row_amax, column_amax, M, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Amaxes of the rows of both gradients (2, M), and of the columns of all three results (3, C)."""
    rows, columns, _, _ = tile_of(M, C, ROWS, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < C)
    results = derived(grad, gate, up, rows.to(tl.int64)[:, None] * C + columns[None, :], inside)
    for i in tl.static_range(3):
        magnitudes = tl.abs(results[i]).to(tl.int32, bitcast=True)
        tl.atomic_max(column_amax + i * C + columns, tl.max(magnitudes, 0), mask=columns < C, sem="relaxed")
        if i < 2:
            tl.atomic_max(row_amax + i * M + rows, tl.max(magnitudes, 1), mask=rows < M, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_round_kernel(  # type: ignore[no-untyped-def]
    grad, gate, up, gate_rows, up_rows, gate_columns, up_columns, product_columns, row_amax, column_amax, row_inverse,
    column_inverse, M, C, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FLOAT8: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients with scales of their rows (M, C), all three results with scales of their columns (C, M), and the
    inverses of these scales (2, M) and (3, C)."""
    rows, columns, first_of_row, first_of_column = tile_of(M, C, ROWS, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < C)
    places = rows.to(tl.int64)[:, None] * C + columns[None, :]
    results = derived(grad, gate, up, places, inside)
    transposed = columns.to(tl.int64)[:, None] * M + rows[None, :]
    written = (columns[:, None] < C) & (rows[None, :] < M)
    by_row, by_column = (gate_rows, up_rows), (gate_columns, up_columns, product_columns)
    for i in tl.static_range(3):
        if i < 2:
            amax, inverse = row_amax + i * M, row_inverse + i * M
            rounded = round_by(amax, inverse, rows, rows < M, first_of_row, results[i], 1, LARGEST, SMALLEST, FLOAT8)
            tl.store(by_row[i] + places, rounded, mask=inside)
        amax, inverse = column_amax + i * C, column_inverse + i * C
        rounded = round_by(
            amax, inverse, columns, columns < C, first_of_column, results[i], 0, LARGEST, SMALLEST, FLOAT8
        )
        tl.store(by_column[i] + transposed, tl.trans(rounded), mask=written)


def round_gradients(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """`swiglu_8bit.round_swiglu_gradients` of row-major (M, C), in int8 or float8_e4m3fn."""
    (rows, columns), options = grad.shape, {**TILE, "num_warps": WARPS}
    by_row = [torch.empty_like(grad, dtype=dtype) for _ in range(2)]
    by_column = [grad.new_empty(columns, rows, dtype=dtype) for _ in range(3)]
    row_amax, row_inverse = grad.new_zeros(2, 2, rows, dtype=torch.float32).unbind()
    column_amax, column_inverse = grad.new_zeros(2, 3, columns, dtype=torch.float32).unbind()
    grid = (triton.cdiv(rows, TILE["ROWS"]) * triton.cdiv(columns, TILE["COLUMNS"]),)
    bits = row_amax.view(torch.int32), column_amax.view(torch.int32)
    swiglu_amax_kernel[grid](grad, gate, up, *bits, rows, columns, **options)
    results = *by_row, *by_column, row_amax, column_amax, row_inverse, column_inverse
    swiglu_round_kernel[grid](grad, gate, up, *results, rows, columns, **constants_of(dtype), **options)
    return *by_row, row_inverse.unsqueeze(2), *(data.t() for data in by_column), column_inverse.unsqueeze(1)
