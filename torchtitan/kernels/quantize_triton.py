"""Rounding of matrices to 8 bits by rows on NVIDIA GPUs that also finds each column's largest magnitude, in Triton.

torch's compiler reads the matrix again for the columns: it does not combine largest numbers over both dimensions.

Nothing here asks Triton for maxima that propagate NaN: beside stores of one byte, Triton of torch 2.14 compiles them
wrongly (triton #11111).
"""

import torch
import triton
import triton.language as tl

from torchtitan.kernels.rounding import INT8_LARGEST, SMALLEST_AMAX, SMALLEST_SCALE


def rows_a_program(rows: int) -> int:
    """Few enough to occupy a GPU, and enough that few programs write magnitudes of the same columns."""
    return min(32, max(8, int(triton.next_power_of_2(rows // 256))))


def warps(columns: int) -> int:
    """32 columns a thread."""
    return max(4, int(triton.next_power_of_2(columns)) // 1024)


def constants_of(dtype: torch.dtype) -> dict[str, float | bool]:
    """What the kernels need to know of int8 or float8_e4m3fn."""
    if dtype == torch.int8:
        return {"LARGEST": INT8_LARGEST, "SMALLEST": SMALLEST_SCALE, "FLOAT8": False}
    return {"LARGEST": torch.finfo(dtype).max, "SMALLEST": SMALLEST_AMAX, "FLOAT8": True}


@triton.jit  # type: ignore[untyped-decorator]
def to_8_bits(exact, LARGEST: tl.constexpr, FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """To nearest, ties to even; values beyond the range saturate. NaN becomes NaN, in int8 some number."""
    if FLOAT8:  # Triton compiles one branch
        # NaN stays; see `avoid_nan_instructions`.
        rounded = tl.where(exact > LARGEST, LARGEST, tl.where(exact < -LARGEST, -LARGEST, exact)).to(tl.float8e4nv)
    else:
        # Sums of this size have no fraction. (Triton's interpreter has no rint. The clamp keeps the multiplication
        # before it from being fused with the addition, which would round once less; a `tl.where` would not.)
        exact = tl.clamp(exact, -LARGEST, LARGEST)
        rounded = ((exact + 12582912.0) - 12582912.0).to(tl.int8)
    return rounded


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(amax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales for these largest magnitudes and their inverses, as `quantize.scale_inverse_of` computes them."""
    one = tl.full(amax.shape, 1.0, tl.float32)
    if FLOAT8:
        wide = amax.to(tl.float64)
        exact = (LARGEST / tl.where(wide < SMALLEST, SMALLEST, wide)).to(tl.float32)
        scale = (exact.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(one, scale)
    else:
        inverse = tl.div_rn(amax, one * LARGEST)
        inverse = tl.where(inverse < SMALLEST, SMALLEST, inverse)
        scale = tl.div_rn(one, inverse)
    return scale, inverse


@triton.jit  # type: ignore[untyped-decorator]
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    data,
    scale_inverse,
    column_amax,
    M,
    N,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    FLOAT8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds up to ROWS of the M rows of a matrix of x, one after another. Magnitudes are compared as integers: float32
    numbers that are not negative have the same order as their bits, and NaN is larger than all."""
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    by_column = tl.zeros((BLOCK,), dtype=tl.int32)
    matrix = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    for row in range(first, min(first + ROWS, M)):
        place = tl.cast(matrix * M + row, tl.int64)
        numbers = tl.load(x + place * N + columns, mask=inside, other=0).to(tl.float32)
        magnitudes = tl.abs(numbers).to(tl.int32, bitcast=True)
        by_column = tl.maximum(by_column, magnitudes)
        amax = tl.max(magnitudes, 0).to(tl.float32, bitcast=True)
        scale, inverse = scale_of(amax, LARGEST, SMALLEST, FLOAT8)
        tl.store(data + place * N + columns, to_8_bits(numbers * scale, LARGEST, FLOAT8), mask=inside)
        tl.store(scale_inverse + place, inverse)
    tl.atomic_max(column_amax + matrix * N + columns, by_column, mask=inside, sem="relaxed")


def round_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From row-major x with up to `quantize.WIDEST` columns: (..., rows, columns) int8 or float8_e4m3fn, (..., rows, 1)
    float32 scale inverses and (..., 1, columns) float32 magnitudes."""
    *matrices, m, n = x.shape
    number, rows = x.shape[:-2].numel(), rows_a_program(m)
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_inverse = torch.empty(*matrices, m, 1, dtype=torch.float32, device=x.device)
    column_amax = torch.zeros(*matrices, 1, n, dtype=torch.int32, device=x.device)
    constants = {**constants_of(dtype), "ROWS": rows, "BLOCK": triton.next_power_of_2(n)}
    grid = triton.cdiv(m, rows), number
    round_rows_kernel[grid](x, data, scale_inverse, column_amax, m, n, **constants, num_warps=warps(n))
    return data, scale_inverse, column_amax.view(torch.float32)
