"""Rounding of a matrix to int8 by rows on NVIDIA GPUs that also finds the largest magnitude of each column, in Triton.

torch's compiler reads the matrix again for the columns: it does not combine largest numbers over both dimensions.
"""

import torch
import triton
import triton.language as tl


def rows_a_program(rows: int) -> int:
    """Few enough to occupy a GPU, and enough that few programs write magnitudes of the same columns."""
    return min(32, max(8, int(triton.next_power_of_2(rows // 256))))


def warps(columns: int) -> int:
    """32 columns a thread."""
    return max(4, int(triton.next_power_of_2(columns)) // 1024)


@triton.jit  # type: ignore[untyped-decorator]
def round_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    data,
    scale_inverse,
    column_amax,
    M,
    N,
    x_stride,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds up to ROWS rows of x, one after another, as the compiler's code for `quantize.quantize` does.

    Magnitudes are compared as integers: float32 numbers that are not negative have the same order as their bits, and
    NaN is larger than all.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    by_column = tl.zeros((BLOCK,), dtype=tl.int32)
    first = tl.program_id(0) * ROWS
    for row in range(first, min(first + ROWS, M)):
        numbers = tl.load(x + tl.cast(row, tl.int64) * x_stride + columns, mask=inside, other=0).to(tl.float32)
        magnitudes = tl.abs(numbers).to(tl.int32, bitcast=True)
        by_column = tl.maximum(by_column, magnitudes)
        inverse = tl.max(magnitudes, 0).to(tl.float32, bitcast=True) * (1.0 / 127.0)
        inverse = tl.where(inverse < SMALLEST, SMALLEST, inverse)  # NaN stays; see `avoid_nan_instructions`
        exact = tl.clamp(numbers * (1.0 / inverse), -127.0, 127.0)
        # To nearest, ties to even: sums of this size have no fraction. (Triton's interpreter has no rint. The clamp
        # keeps the multiplication from being fused with the addition, which would round once less.)
        rounded = (exact + 12582912.0) - 12582912.0
        tl.store(data + tl.cast(row, tl.int64) * N + columns, rounded.to(tl.int8), mask=inside)
        tl.store(scale_inverse + row, inverse)
    tl.atomic_max(column_amax + columns, by_column, mask=inside, sem="relaxed")


def round_rows(x: torch.Tensor, smallest: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, columns) int8, (rows, 1) float32 scale inverses and (1, columns) float32 magnitudes.

    Args:
        x: (rows, columns), row-major, with up to `quantize.WIDEST` columns.
        smallest: scale inverse of a row of zeros.
    """
    (m, n), rows = x.shape, rows_a_program(x.shape[0])
    data = torch.empty(m, n, dtype=torch.int8, device=x.device)
    scale_inverse = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    column_amax = torch.zeros(1, n, dtype=torch.int32, device=x.device)
    round_rows_kernel[(triton.cdiv(m, rows),)](
        x,
        data,
        scale_inverse,
        column_amax,
        m,
        n,
        x.stride(0),
        SMALLEST=smallest,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(n),
        num_warps=warps(n),
    )
    return data, scale_inverse, column_amax.view(torch.float32)
