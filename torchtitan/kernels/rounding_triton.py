"""Rounding of matrices to 8 bits on NVIDIA GPUs, for both sums that a GEMM may run over, in Triton.

`round_rows_triton` rounds by rows and also finds each column's amax. (torch's compiler reads the matrix
again for the columns: it does not combine largest numbers over both dimensions.) `round_both` rounds the rows of
experts: for sums over channels a row has a scale; for sums over an expert's rows, each channel of each expert. It reads
the rows twice and writes each 8-bit copy once, the second one transposed and with its experts' rows filled up.

Magnitudes are compared as integers: float32 numbers that are not negative have the same order as their bits, and NaN is
larger than all. Nothing here asks Triton for maxima that propagate NaN: beside stores of one byte, Triton of torch 2.14
compiles them wrongly (triton #11111).

Shapes: E experts, M rows of all experts together, sorted by expert, C channels.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.kernels.grouped_gemm import ALIGNMENT
from torchtitan.kernels.rounding import INT8_LARGEST, SMALLEST_AMAX, SMALLEST_SCALE

TILE = {"ROWS": 64, "COLUMNS": 64}  # tile of `round_both`
COLUMN_MULTIPLE = tl.constexpr(ALIGNMENT)


def rows_a_program(rows: int) -> int:
    """Of the rows of all matrices: few enough to occupy a GPU, and enough that few programs write magnitudes of the
    same columns."""
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
def scales_of(amax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales for these amaxes and their inverses, as `quantize.scale_by` computes them."""
    ones = tl.full(amax.shape, 1.0, tl.float32)
    if FLOAT8:  # see `quantize.float8_powers_of_two`
        most = tl.full(amax.shape, LARGEST, tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(amax < SMALLEST, SMALLEST, amax).to(tl.int32, bitcast=True)
        exponent = (bits + (0x7FFFFF - (most & 0x7FFFFF))) & 0x7F800000
        inverse = exponent - ((most & 0x7F800000) - 0x3F800000)
        scale = 0x7F000000 - inverse
        infinite, nan = amax == float("inf"), amax != amax
        scale = tl.where(nan, 0x7F800000, tl.where(infinite, 0, scale)).to(tl.float32, bitcast=True)
        inverse = tl.where(nan, 0, tl.where(infinite, 0x7F800000, inverse)).to(tl.float32, bitcast=True)
    else:
        inverse = tl.div_rn(amax, ones * LARGEST)
        inverse = tl.where(inverse < SMALLEST, SMALLEST, inverse)
        scale = tl.div_rn(ones, inverse)
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
    """Rounds up to ROWS of the M rows of a matrix of x, one after another."""
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
        scale, inverse = scales_of(amax, LARGEST, SMALLEST, FLOAT8)
        tl.store(data + place * N + columns, to_8_bits(numbers * scale, LARGEST, FLOAT8), mask=inside)
        tl.store(scale_inverse + place, inverse)
    tl.atomic_max(column_amax + matrix * N + columns, by_column, mask=inside, sem="relaxed")


def round_rows_triton(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From row-major x with up to `quantize.WIDEST` columns: (..., rows, columns) int8 or float8_e4m3fn, (..., rows, 1)
    float32 scale inverses and (..., 1, columns) float32 magnitudes."""
    *matrices, m, n = x.shape
    number, rows = x.shape[:-2].numel(), rows_a_program(x.shape[:-1].numel())
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_inverse = torch.empty(*matrices, m, 1, dtype=torch.float32, device=x.device)
    column_amax = torch.zeros(*matrices, 1, n, dtype=torch.int32, device=x.device)
    constants = {**constants_of(dtype), "ROWS": rows, "BLOCK": triton.next_power_of_2(n)}
    grid = triton.cdiv(m, rows), number
    round_rows_kernel[grid](x, data, scale_inverse, column_amax, m, n, **constants, num_warps=warps(n))
    return data, scale_inverse, column_amax.view(torch.float32)


@triton.jit  # type: ignore[untyped-decorator]
def bounds(ends, E, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of the experts, where their rows start, and where they end. EXPERTS: E or the next power of two."""
    experts = tl.arange(0, EXPERTS)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    return experts, start, tl.load(ends + experts, mask=experts < E, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_tile(ends, E, tile, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile of up to ROWS rows, its first row and the end of the expert's rows. Tiles are counted
    through all experts; one after the last has the expert EXPERTS, as in `bounds`."""
    experts, start, end = bounds(ends, E, EXPERTS)
    tiles = (end - start + ROWS - 1) // ROWS
    end_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((end_tile <= tile).to(tl.int32), 0)
    mine = experts == expert
    first_row = tl.sum(tl.where(mine, start + (tile - end_tile + tiles) * ROWS, 0), 0)
    return expert, first_row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(  # type: ignore[no-untyped-def]
    x, source, factor, rows, columns, end, C, GATHER: tl.constexpr, FACTOR: tl.constexpr
):
    """The operand's numbers at these places as float32, 0 outside: rows `source` of x if GATHER, times `factor`,
    rounded to the dtype of x, if FACTOR."""
    inside = (rows[:, None] < end) & (columns[None, :] < C)
    from_rows = tl.load(source + rows, mask=rows < end, other=0) if GATHER else rows
    numbers = tl.load(x + from_rows.to(tl.int64)[:, None] * C + columns[None, :], mask=inside, other=0).to(tl.float32)
    if FACTOR:
        times = tl.load(factor + rows, mask=rows < end, other=0).to(tl.float32)
        numbers = (numbers * times[:, None]).to(x.dtype.element_ty).to(tl.float32)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def amax_kernel(  # type: ignore[no-untyped-def]
    x, source, factor, row_amax, column_amax, ends, E, C,
    GATHER: tl.constexpr, FACTOR: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Amaxes of a tile's rows and columns."""
    tiles = tl.cdiv(C, COLUMNS)
    expert, first, end = rows_of_tile(ends, E, tl.program_id(0) // tiles, EXPERTS, ROWS)
    if expert < E:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
        numbers = load_tile(x, source, factor, rows, columns, end, C, GATHER, FACTOR)
        magnitudes = tl.abs(numbers).to(tl.int32, bitcast=True)
        tl.atomic_max(row_amax + rows, tl.max(magnitudes, 1), mask=rows < end, sem="relaxed")
        tl.atomic_max(column_amax + expert * C + columns, tl.max(magnitudes, 0), mask=columns < C, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def round_by(  # type: ignore[no-untyped-def]
    amaxes, inverses, places, inside, writes, numbers, AXIS: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """A tile's numbers in 8 bits, with a scale for each row (AXIS 1) or column (AXIS 0), by the amaxes at these places.
    Writes the inverses of the scales if `writes`."""
    amax = tl.load(amaxes + places, mask=inside, other=0)
    scale, inverse = scales_of(amax, LARGEST, SMALLEST, FLOAT8)
    tl.store(inverses + places, inverse, mask=inside & writes)
    return to_8_bits(numbers * tl.expand_dims(scale, AXIS), LARGEST, FLOAT8)


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(  # type: ignore[no-untyped-def]
    x, source, factor, by_row, by_column, row_amax, column_amax, row_inverse, column_inverse, ends, padded_ends, E, C,
    padded_rows, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FLOAT8: tl.constexpr, GATHER: tl.constexpr,
    FACTOR: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the operand with scales of its rows to `by_row` (M, C), and with scales of its columns to
    `by_column` (C, padded_rows), where each expert's rows are followed by zeros up to its padded end; inverses of
    scales; and the padded ends."""
    tiles = tl.cdiv(C, COLUMNS)
    expert, first, end = rows_of_tile(ends, E, tl.program_id(0) // tiles, EXPERTS, ROWS)
    experts, all_starts, all_ends = bounds(ends, E, EXPERTS)
    # In units of what they are multiples of: a thread stores 16 numbers at once if Triton knows that.
    counts = (all_ends - all_starts + COLUMN_MULTIPLE - 1) // COLUMN_MULTIPLE
    padded = tl.cumsum(counts, 0)
    tl.store(padded_ends + experts, padded * COLUMN_MULTIPLE, mask=(experts < E) & (tl.program_id(0) == 0))
    if expert < E:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < end) & (columns[None, :] < C)
        numbers = load_tile(x, source, factor, rows, columns, end, C, GATHER, FACTOR)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)

        first_tile = tl.program_id(0) % tiles == 0
        places = rows.to(tl.int64)[:, None] * C + columns[None, :]
        rounded = round_by(row_amax, row_inverse, rows, rows < end, first_tile, numbers, 1, LARGEST, SMALLEST, FLOAT8)
        tl.store(by_row + places, rounded, mask=inside)

        rounded = round_by(
            column_amax + expert * C, column_inverse + expert * C, columns, columns < C, first == start, numbers, 0,
            LARGEST, SMALLEST, FLOAT8,
        )  # fmt: skip
        padded_end = tl.sum(tl.where(experts == expert, padded, 0), 0) * COLUMN_MULTIPLE
        padded_start = padded_end - tl.sum(tl.where(experts == expert, counts, 0), 0) * COLUMN_MULTIPLE
        places = tl.multiple_of(padded_start + first - start, COLUMN_MULTIPLE) + tl.arange(0, ROWS)
        written = (columns[:, None] < C) & (places[None, :] < padded_end)
        tl.store(
            by_column + columns.to(tl.int64)[:, None] * padded_rows + places[None, :], tl.trans(rounded), mask=written
        )


def round_both(
    x: torch.Tensor,
    ends: torch.Tensor,
    padded_rows: int,
    dtype: torch.dtype,
    source: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In int8 or float8_e4m3fn, (M, C), row-major, and (M, 1) float32 inverses of its scales; (padded_rows, C),
    column-major, and (E, C) inverses, 0 for experts without rows; (E,) int32, the ends of the experts' rows there,
    multiples of `ALIGNMENT`. What is after the last of them is not written.

    Args:
        x: (M, C), row-major.
        ends: (E,) int32, the ends of each expert's rows, the last one M.
        source: (M,) int64: the operand's rows are these of x, which may have any number of rows.
        factor: (M,): and are multiplied by these first, in the dtype of x.
    """
    (rows, columns), experts = x.shape, ends.shape[0]
    rows = rows if source is None else source.shape[0]
    empty: Any = functools.partial(torch.empty, device=x.device)
    by_row, by_column = empty(rows, columns, dtype=dtype), empty(columns, padded_rows, dtype=dtype)
    row_amax = torch.zeros(rows, dtype=torch.float32, device=x.device)
    column_amax, column_inverse = torch.zeros(2, experts, columns, dtype=torch.float32, device=x.device).unbind()
    row_inverse, padded_ends = empty(rows, 1, dtype=torch.float32), torch.empty_like(ends)
    # The compiler's passes may hand on a column of a matrix, but the kernels read what lies side by side.
    operand = tuple(x if given is None else given.contiguous() for given in (x, source, factor))
    constants: dict[str, Any] = {"GATHER": source is not None, "FACTOR": factor is not None}
    constants |= {"EXPERTS": triton.next_power_of_2(experts), **TILE}
    # Each expert's last tile may be partly filled. All tiles are along the first dimension: others hold 65,535.
    grid = (triton.cdiv(columns, TILE["COLUMNS"]) * (triton.cdiv(rows, TILE["ROWS"]) + experts),)
    bits = row_amax.view(torch.int32), column_amax.view(torch.int32)
    amax_kernel[grid](*operand, *bits, ends, experts, columns, **constants)
    outputs = (by_row, by_column, row_amax, column_amax, row_inverse, column_inverse)
    sizes = (experts, columns, padded_rows)
    round_kernel[grid](*operand, *outputs, ends, padded_ends, *sizes, **constants_of(dtype), **constants)
    return by_row, row_inverse, by_column.t(), column_inverse, padded_ends
