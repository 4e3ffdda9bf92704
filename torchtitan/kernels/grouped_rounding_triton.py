"""Rounding of experts' rows to 8 bits on NVIDIA GPUs, for both sums that a grouped GEMM may run over, in Triton.

For sums over channels a row has a scale; for sums over an expert's rows, each channel of each expert. Both together
read the rows twice and write each 8-bit copy once, the second one transposed and with its experts' rows filled up.

Shapes: E experts, M rows of all experts together, sorted by expert, C channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.kernels.quantize_triton import constants_of, to_8_bits

TILE = {"ROWS": 64, "COLUMNS": 64}


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_tile(ends, E, tile, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile of up to ROWS rows, its first row and the end of the expert's rows. Tiles are counted
    through all experts; one after the last has the expert EXPERTS. EXPERTS: E or the next power of two."""
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends + experts, mask=experts < E, other=0)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    end_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((end_tile <= tile).to(tl.int32), 0)
    mine = experts == expert
    first_row = tl.sum(tl.where(mine, start + (tile - end_tile + tiles) * ROWS, 0), 0)
    return expert, first_row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def amax_kernel(  # type: ignore[no-untyped-def]
    x,
    row_amax,
    column_amax,
    ends,
    E,
    C,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Largest magnitudes of a tile's rows and columns. They are compared as integers: float32 numbers that are not
    negative have the same order as their bits, and NaN is larger than all."""
    expert, first, end = rows_of_tile(ends, E, tl.program_id(1), EXPERTS, ROWS)
    if expert < E:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < end) & (columns[None, :] < C)
        numbers = tl.load(x + rows.to(tl.int64)[:, None] * C + columns[None, :], mask=inside, other=0).to(tl.float32)
        magnitudes = tl.abs(numbers).to(tl.int32, bitcast=True)
        tl.atomic_max(row_amax + rows, tl.max(magnitudes, 1), mask=rows < end, sem="relaxed")
        tl.atomic_max(column_amax + expert * C + columns, tl.max(magnitudes, 0), mask=columns < C, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(  # type: ignore[no-untyped-def]
    x,
    by_row,
    by_column,
    row_scale,
    column_scale,
    ends,
    padded_ends,
    E,
    C,
    padded_rows,
    LARGEST: tl.constexpr,
    FLOAT8: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of x times the scales of its rows, to `by_row` (M, C), and times those of its columns, to `by_column`
    (C, padded_rows), where each expert's rows are followed by zeros up to its padded end."""
    expert, first, end = rows_of_tile(ends, E, tl.program_id(1), EXPERTS, ROWS)
    if expert < E:
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < end) & (columns[None, :] < C)
        place = rows.to(tl.int64)[:, None] * C + columns[None, :]
        numbers = tl.load(x + place, mask=inside, other=0).to(tl.float32)
        scale = tl.load(row_scale + rows, mask=rows < end, other=0)
        tl.store(by_row + place, to_8_bits(numbers * scale[:, None], LARGEST, FLOAT8), mask=inside)
        scale = tl.load(column_scale + expert * C + columns, mask=columns < C, other=0)
        rounded = tl.trans(to_8_bits(numbers * scale[None, :], LARGEST, FLOAT8))
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        padded_start = tl.load(padded_ends + expert - 1, mask=expert > 0, other=0)
        padded = padded_start + rows - start
        written = (columns[:, None] < C) & (padded[None, :] < tl.load(padded_ends + expert))
        tl.store(by_column + columns.to(tl.int64)[:, None] * padded_rows + padded[None, :], rounded, mask=written)


def _grid(x: torch.Tensor, experts: int) -> tuple[int, int]:
    # Each expert's last tile may be partly filled. Most tiles are along the second dimension, whose size is limited.
    return triton.cdiv(x.shape[1], TILE["COLUMNS"]), triton.cdiv(x.shape[0], TILE["ROWS"]) + experts


def amax_both(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, 1) and (E, C) float32: the largest magnitudes of the rows, and of each expert's columns.

    Args:
        x: (M, C), row-major.
        ends: (E,) int32, the end of each expert's rows; the last one is M.
    """
    experts = ends.shape[0]
    row_amax = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
    column_amax = torch.zeros(experts, x.shape[1], dtype=torch.int32, device=x.device)
    constants: dict[str, Any] = {"EXPERTS": triton.next_power_of_2(experts), **TILE}
    amax_kernel[_grid(x, experts)](x, row_amax, column_amax, ends, experts, x.shape[1], **constants)
    return row_amax.view(torch.float32), column_amax.view(torch.float32)


def round_both(
    x: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    ends: torch.Tensor,
    padded_ends: torch.Tensor,
    padded_rows: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, C), row-major, and (padded_rows, C), column-major, in int8 or float8_e4m3fn.

    Args:
        x: (M, C), row-major.
        row_scale, column_scale: (M, 1) and (E, C) float32.
        ends, padded_ends: (E,) int32, the ends of each expert's rows in x and in the second result. There, what is
            after the last end is not written.
    """
    experts, columns = column_scale.shape
    by_row = torch.empty(x.shape, dtype=dtype, device=x.device)
    by_column = torch.empty(columns, padded_rows, dtype=dtype, device=x.device)
    constants = constants_of(dtype)
    round_kernel[_grid(x, experts)](
        x,
        by_row,
        by_column,
        row_scale.contiguous(),
        column_scale.contiguous(),
        ends,
        padded_ends,
        experts,
        columns,
        padded_rows,
        LARGEST=constants["LARGEST"],
        FLOAT8=constants["FLOAT8"],
        EXPERTS=triton.next_power_of_2(experts),
        **TILE,
    )
    return by_row, by_column.t()
