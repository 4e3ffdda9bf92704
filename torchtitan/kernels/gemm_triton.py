"""GEMMs of 8-bit matrices on NVIDIA GPUs with the scaling in the GEMM's own epilogue, in Triton.

`torch._int_mm` writes int32 sums, which a second kernel reads, scales and writes again: 10 bytes for each number of the
result in place of 2.

Grouped GEMMs multiply each expert's rows with its weight. The number of these rows stays on the device: a program finds
its expert from the ends of the experts' rows. torch has such GEMMs for float8 alone, and for compute capability 9.0 and
10.0 alone (`_scaled_grouped_mm`).

Shapes: (M, K) x (K, N) to (M, N). Grouped: E experts, M rows of all experts together, K inputs and N outputs of each
expert's layer.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.kernels.grouped_gemm import ALIGNMENT
from torchtitan.kernels.quantize import Quantized
from torchtitan.kernels.rounding_triton import rows_of_tile

GROUP = 8  # rows of tiles that run side by side, so that they find each other's operands in the L2 cache


CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (128, 256, 128, 8, 3),
        (128, 128, 128, 8, 3),
        (128, 128, 64, 4, 4),
        (64, 128, 128, 4, 4),
    ]
]
"""They fit the shared memory of Ampere (163 KiB) and Hopper."""
FLOAT8_BLOCK_K = 128
"""The tensor core sums float8 products of so many numbers before they are added to the float32 sums. The result's bits
depend on it, so that timing must not choose it."""


@triton.jit  # type: ignore[untyped-decorator]
def product_of_tiles(  # type: ignore[no-untyped-def]
    a_tile, b_tile, length, FAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """a @ b over `length` numbers, from the pointers to the first BLOCK_K of them: int32 of int8, float32 of float8.

    Hopper sums float8 products with 14 bits (arXiv 2412.19437, 3.3.2); unless FAST, only within one `tl.dot`.
    """
    inner = tl.arange(0, BLOCK_K)
    INT8: tl.constexpr = a_tile.dtype.element_ty == tl.int8
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if INT8 else tl.float32)
    for k in range(0, length, BLOCK_K):
        left = tl.load(a_tile, mask=inner[None, :] < length - k, other=0.0)
        right = tl.load(b_tile, mask=inner[:, None] < length - k, other=0.0)
        if FAST or INT8:  # Triton compiles one branch
            sums = tl.dot(left, right, acc=sums, out_dtype=sums.dtype)
        else:
            sums = tl.dot(left, right, acc=sums, out_dtype=sums.dtype, max_num_imprecise_acc=BLOCK_K)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def int8_gemm_kernel(  # type: ignore[no-untyped-def]
    a,
    row_scale,
    b,
    column_scale,
    out,
    M,
    N,
    K,
    a_stride,
    b_stride,
    row_scale_stride,
    column_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of out = (a @ b) * row_scale * column_scale, in the order of the operator's arguments. K is the fast
    dimension of both operands; a scale's stride is 0 if there is only one."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (GROUP * tiles_n) * GROUP
    group = min(tiles_m - first, GROUP)
    in_group = tile % (GROUP * tiles_n)
    rows = (first + in_group % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = in_group // group * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Beyond the edges, tiles read the first rows and columns again, and write nothing.
    a_tile = a + (rows % M).to(tl.int64)[:, None] * a_stride + inner[None, :]
    b_tile = b + (columns % N).to(tl.int64)[None, :] * b_stride + inner[:, None]
    sums = product_of_tiles(a_tile, b_tile, K, False, BLOCK_M, BLOCK_N, BLOCK_K)
    by_row = tl.load(row_scale + (rows % M) * row_scale_stride)
    by_column = tl.load(column_scale + (columns % N) * column_scale_stride)
    result = sums.to(tl.float32) * by_row[:, None] * by_column[None, :]
    places = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


tuned_int8 = triton.autotune(CONFIGS, key=["M", "N", "K"])(int8_gemm_kernel)
_CHOSEN: dict[tuple[object, ...], dict[str, Any]] = {}
"""What timing chose for int8 GEMMs, by device, the power of two that M fits into, N and K: other M, as in validation,
are not timed again. The result's bits do not depend on it, since int32 sums are exact."""


def int8_gemm(
    a: torch.Tensor,
    row_scale: torch.Tensor,
    b: torch.Tensor,
    column_scale: torch.Tensor,
    dtype: torch.dtype,
    traced: bool = False,
) -> torch.Tensor:
    """a @ b with int32 sums, scaled in float32, rounded to `dtype`.

    Args:
        a: (M, K), row-major; scales (M, 1), (1, 1) or ().
        b: (K, N), column-major; scales (1, N), (1, 1) or ().
        traced: the compiler is tracing; its code chooses a configuration for each N and K, and launches it.
    """
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=dtype, device=a.device)

    def grid(meta: Mapping[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    by_row = row_scale.stride(0) if row_scale.numel() > 1 else 0
    by_column = column_scale.stride(1) if column_scale.numel() > 1 else 0
    arguments = (a, row_scale, b, column_scale, out, m, n, k, a.stride(0), b.stride(1), by_row, by_column)
    if traced:
        torch.library.wrap_triton(tuned_int8)[grid](*arguments, GROUP=GROUP)
        return out
    key = (a.device, triton.next_power_of_2(m), n, k)
    if chosen := _CHOSEN.get(key):  # without Triton's own look-up, which takes the host longer
        int8_gemm_kernel[grid(chosen)](*arguments, GROUP=GROUP, **chosen)
    else:
        tuned_int8[grid](*arguments, GROUP=GROUP)
        _CHOSEN[key] = tuned_int8.best_config.all_kwargs()
    return out


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
    """The configurations whose results are equal to the bit, and whose sums fit the registers: a tile's sums are there
    twice, unless they are FAST or int8."""
    if arguments["a"].dtype == torch.int8:
        return configs
    equal = [config for config in configs if config.kwargs["BLOCK_K"] == FLOAT8_BLOCK_K]
    return [config for config in equal if FAST or config.kwargs["BLOCK_N"] <= 128]


# Not for each M: under expert parallelism it differs in every step.
_tune = functools.partial(triton.autotune, CONFIGS, prune_configs_by={"early_config_prune": fitting})
tuned_grouped = _tune(key=["N", "K", "FAST"])(grouped_kernel)
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

    if m == 0:  # else a rank without tokens would choose the configuration from empty launches
        return out
    matrices = a.data.contiguous(), b.data.mT.contiguous(), out
    scales = a.scale_inverse.contiguous(), b.scale_inverse.contiguous()
    tuned_grouped[grid](*matrices, *scales, ends, experts, n, k, FAST=fast, EXPERTS=triton.next_power_of_2(experts))
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

    if m == 0:
        return out.zero_()
    matrices = a.data.t().contiguous(), b.data.t().contiguous(), out
    scales = a.scale_inverse.contiguous(), b.scale_inverse.contiguous()
    tuned_over_rows[grid](*matrices, *scales, ends, m, n, k, ALIGNMENT=ALIGNMENT)
    return out
