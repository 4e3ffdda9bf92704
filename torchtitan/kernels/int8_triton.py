"""int8 GEMMs on NVIDIA GPUs with the scaling in the GEMM's own epilogue, in Triton.

`torch._int_mm` writes int32 sums, which a second kernel reads, scales and writes again: 10 bytes for each number of the
result in place of 2.

Shapes: (M, K) x (K, N) to (M, N).
"""

import torch
import triton
import triton.language as tl

from torchtitan.kernels.quantize import Quantized

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
    b,
    out,
    row_scale,
    column_scale,
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
    """A tile of out = (a @ b) * row_scale * column_scale. K is the fast dimension of both operands; a scale's stride is
    0 if there is only one."""
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


tuned = triton.autotune(CONFIGS, key=["M", "N", "K"])(int8_gemm_kernel)


def int8_gemm(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """a @ b with int32 sums, scaled in float32, rounded to `dtype`.

    Args:
        a: (M, K), row-major; scales (M, 1), (1, 1) or ().
        b: (K, N), column-major; scales (1, N), (1, 1) or ().
    """
    (left, row_scale), (right, column_scale) = a, b
    (m, k), n = left.shape, right.shape[1]
    out = torch.empty(m, n, dtype=dtype, device=left.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    by_row = row_scale.stride(0) if row_scale.numel() > 1 else 0
    by_column = column_scale.stride(1) if column_scale.numel() > 1 else 0
    strides = left.stride(0), right.stride(1), by_row, by_column
    tuned[grid](left, right, out, row_scale, column_scale, m, n, k, *strides, GROUP=GROUP)
    return out
