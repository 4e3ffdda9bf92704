"""Rounding of a matrix, and of its transpose, to mxfp8 for cuBLASLt, on NVIDIA GPUs, in Triton: one pass.

A program reads a tile of `SIZE` x `SIZE` numbers, whose scales are one tile of cuBLASLt's layout in both directions.
Results equal `block_formats.quantize_blocks`, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.kernels.rounding_triton import to_8_bits

SIZE, BLOCK = 128, 32
TILE: dict[str, Any] = {"SIZE": SIZE, "BLOCK": BLOCK, "LARGEST": 448.0}
WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _factors(amax, LARGEST: tl.constexpr, MODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the bits of amaxes: the exponents of E8M0 scales as they are stored, and inverses of these."""
    finite = amax < 0x7F800000
    if MODE == "rceil":
        amax = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, LARGEST, tl.float32))
        amax = amax.to(tl.int32, bitcast=True)
    exponent, mantissa = amax >> 23, amax & 0x7FFFFF
    if (MODE == "rceil") | (MODE == "ceil"):  # the smallest exponent belongs to 2^-127, half a normal number
        exponent += (mantissa > tl.where(exponent == 0, 0x400000, 0)).to(tl.int32)
    elif MODE == "even":  # its mantissa, rounded to three bits, is 2
        exponent += (mantissa >= 0x780000).to(tl.int32)
    if MODE != "rceil":
        exponent = tl.maximum(exponent - 8, 0)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, exponent, 255), tl.where(finite, factor, float("nan"))


@triton.jit  # type: ignore[untyped-decorator]
def _store_scales(  # type: ignore[no-untyped-def]
    scale, exponents, tile, rows_left, blocks_left, SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    """A tile of cuBLASLt's layout (`packed_blocks.Packed`), with zeros outside of the matrix."""
    row, block = tl.arange(0, SIZE), tl.arange(0, BLOCKS)
    inside = (row < rows_left)[:, None] & (block < blocks_left)[None, :]
    place = tile.to(tl.int64) * (SIZE * BLOCKS) + (row % 32 * 16 + row // 32 * 4)[:, None] + block[None, :]
    tl.store(scale + place, tl.where(inside, exponents, 0).to(tl.uint8))


@triton.jit  # type: ignore[untyped-decorator]
def mx_pack_kernel(  # type: ignore[no-untyped-def]
    x, by_row, row_scale, by_column, column_scale, M, N, row_stride, column_stride,
    MODE: tl.constexpr, BOTH: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of x, (M, N), to `by_row` and, if BOTH, of its transpose to `by_column`, both row-major."""
    BLOCKS: tl.constexpr = SIZE // BLOCK
    first_row, first_column = tl.program_id(0) * SIZE, tl.program_id(1) * SIZE
    rows, columns = first_row + tl.arange(0, SIZE), first_column + tl.arange(0, SIZE)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    places = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    numbers = tl.load(x + places, mask=inside, other=0).to(tl.float32)
    magnitudes = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    exponent, factor = _factors(tl.max(tl.reshape(magnitudes, (SIZE, BLOCKS, BLOCK)), 2), LARGEST, MODE)
    exact = tl.reshape(tl.reshape(numbers, (SIZE, BLOCKS, BLOCK)) * factor[:, :, None], (SIZE, SIZE))
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(by_row + place, to_8_bits(exact, LARGEST, True), mask=inside)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    _store_scales(row_scale, exponent, tile, M - first_row, (N - first_column) // BLOCK, SIZE, BLOCKS)
    if BOTH:
        exponent, factor = _factors(tl.max(tl.reshape(magnitudes, (BLOCKS, BLOCK, SIZE)), 1), LARGEST, MODE)
        exact = tl.reshape(tl.reshape(numbers, (BLOCKS, BLOCK, SIZE)) * factor[:, None, :], (SIZE, SIZE))
        place = columns.to(tl.int64)[:, None] * M + rows[None, :]
        tl.store(by_column + place, tl.trans(to_8_bits(exact, LARGEST, True)), mask=tl.trans(inside))
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        _store_scales(column_scale, tl.trans(exponent), tile, N - first_column, (M - first_row) // BLOCK, SIZE, BLOCKS)


def pack_mx(x: torch.Tensor, mode: str, out: Sequence[torch.Tensor]) -> None:
    """Writes data and scales of `packed_blocks.Packed` to `out`; if it has four tensors, the transpose's to the last
    two.

    Args:
        x: (M, N), float32 or bfloat16, with any strides. N is a multiple of 32, and so is M for a transpose.
        mode: of scales, see `block_formats.ScaleMode`.
    """
    both = len(out) == 4
    pointers = [tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor for tensor in out]
    pointers = pointers if both else pointers * 2  # without a transpose, the kernel does not use the second half
    grid = triton.cdiv(x.shape[0], SIZE), triton.cdiv(x.shape[1], SIZE)
    mx_pack_kernel[grid](x, *pointers, *x.shape, *x.stride(), MODE=mode, BOTH=both, **TILE, num_warps=WARPS)
