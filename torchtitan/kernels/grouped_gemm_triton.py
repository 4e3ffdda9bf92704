"""Grouped GEMMs of 8-bit matrices on NVIDIA GPUs with the scaling in the GEMM's own epilogue, in Triton.

The number of an expert's rows stays on the device: a program finds its expert from the ends of the experts' rows.
torch has such GEMMs for float8 alone, and for compute capability 9.0 and 10.0 alone (`_scaled_grouped_mm`).

Shapes: E experts, M rows of all experts together, K inputs and N outputs of each expert's layer.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.kernels.grouped_gemm import ALIGNMENT
from torchtitan.kernels.grouped_rounding_triton import rows_of_tile
from torchtitan.kernels.int8_triton import CONFIGS, product_of_tiles
from torchtitan.kernels.quantize import Quantized


@triton.jit  # type: ignore[untyped-decorator]
def grouped_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    out,
    row_scale,
    column_scale,
    ends,
    E,
    N,
    K,
    FAST: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of (a @ b[expert]) * row_scale * column_scale[expert] for some rows of one expert.

    Layouts: a (M, K) and b (E, N, K), row-major. EXPERTS: E or the next power of two.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m = tl.program_id(0) // tiles_n
    expert, first_row, end_row = rows_of_tile(ends, E, tile_m, EXPERTS, BLOCK_M)
    if expert >= E:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Beyond the edges, tiles read the expert's last row and the first columns again, and write nothing.
    a_rows = tl.minimum(rows, end_row - 1)
    a_tile = a + a_rows.to(tl.int64)[:, None] * K + inner[None, :]
    b_tile = b + expert.to(tl.int64) * N * K + (columns % N)[None, :] * K + inner[:, None]
    sums = product_of_tiles(a_tile, b_tile, K, FAST, BLOCK_M, BLOCK_N, BLOCK_K)
    by_row = tl.load(row_scale + a_rows)
    by_column = tl.load(column_scale + expert * N + columns % N)
    result = sums.to(tl.float32) * by_row[:, None] * by_column[None, :]
    places = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=(rows[:, None] < end_row) & (columns[None, :] < N))


@triton.jit  # type: ignore[untyped-decorator]
def over_rows_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    out,
    row_scale,
    column_scale,
    ends,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """A tile of out[expert] = (a[rows].T @ b[rows]) * row_scale[expert] * column_scale[expert], over an expert's rows.

    Layouts: a (N, M) and b (K, M), row-major: M, over which a tile sums, is the fast dimension. A tile of the result is
    BLOCK_M x BLOCK_N, as in `int8_gemm_kernel`, and BLOCK_K rows are summed at a time.
    """
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    start, end = tl.multiple_of(start, ALIGNMENT), tl.multiple_of(end, ALIGNMENT)
    tiles_k = tl.cdiv(K, BLOCK_N)
    rows = tl.program_id(0) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_tile = a + (rows % N).to(tl.int64)[:, None] * M + start + inner[None, :]
    b_tile = b + (columns % K).to(tl.int64)[None, :] * M + start + inner[:, None]
    sums = product_of_tiles(a_tile, b_tile, end - start, False, BLOCK_M, BLOCK_N, BLOCK_K)
    by_row = tl.load(row_scale + expert * N + rows % N)
    by_column = tl.load(column_scale + expert * K + columns % K)
    result = sums.to(tl.float32) * by_row[:, None] * by_column[None, :]
    places = out + expert.to(tl.int64) * N * K + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=(rows[:, None] < N) & (columns[None, :] < K))


def fitting(
    configs: list[triton.Config], arguments: Mapping[str, Any], FAST: bool = False, **constants: Any
) -> list[triton.Config]:
    """The configurations whose sums fit the registers: a tile's sums are there twice, unless they are FAST or int8."""
    once = FAST or arguments["a"].dtype == torch.int8
    return [config for config in configs if once or config.kwargs["BLOCK_N"] <= 128]


# Not for each M: under expert parallelism it differs in every step.
_tune = functools.partial(triton.autotune, CONFIGS, prune_configs_by={"early_config_prune": fitting})
tuned = _tune(key=["N", "K", "FAST"])(grouped_kernel)
tuned_over_rows = _tune(key=["N", "K"])(over_rows_kernel)


def grouped_gemm(a: Quantized, b: Quantized, ends: torch.Tensor, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """(M, K) x (E, K, N) to (M, N): the rows of expert e times b[e], with int32 or float32 sums, scaled in float32.

    Args:
        a: (M, K) int8 or float8_e4m3fn, copied unless row-major; scales (M, 1).
        b: (E, K, N) of the same dtype, copied unless each matrix is column-major; scales (E, 1, N).
        ends: (E,) int32, the end of each expert's rows; the last one is M.
        fast: sum float8 products in reduced precision.
    """
    (m, k), (experts, _, n) = a.data.shape, b.data.shape
    out = torch.empty(m, n, dtype=dtype, device=a.data.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        # Each expert's last tile may be partly filled.
        return ((triton.cdiv(m, meta["BLOCK_M"]) + experts) * triton.cdiv(n, meta["BLOCK_N"]),)

    matrices = a.data.contiguous(), b.data.mT.contiguous(), out
    scales = a.scale_inverse.contiguous(), b.scale_inverse.contiguous()
    tuned[grid](*matrices, *scales, ends, experts, n, k, FAST=fast, EXPERTS=triton.next_power_of_2(experts))
    return out


def grouped_gemm_over_rows(a: Quantized, b: Quantized, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(M, N) and (M, K) to (E, N, K): a.T @ b over each expert's rows, with int32 or float32 sums, scaled in
    float32.

    Args:
        a, b: int8 or float8_e4m3fn, copied unless column-major; scales (E, N) and (E, K).
        ends: (E,) int32 multiples of ALIGNMENT, the end of each expert's rows. Rows after the last are not read.
    """
    (m, n), k, experts = a.data.shape, b.data.shape[1], ends.shape[0]
    out = torch.empty(experts, n, k, dtype=dtype, device=a.data.device)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(n, meta["BLOCK_M"]) * triton.cdiv(k, meta["BLOCK_N"]), experts

    matrices = a.data.t().contiguous(), b.data.t().contiguous(), out
    scales = a.scale_inverse.contiguous(), b.scale_inverse.contiguous()
    tuned_over_rows[grid](*matrices, *scales, ends, m, n, k, ALIGNMENT=ALIGNMENT)
    return out
