"""Rounding of a matrix to nvfp4 for cuBLASLt, on NVIDIA GPUs, in Triton: two passes, of which the first finds what
depends on the whole matrix.

torch's compiler would need the 16 numbers of a block as separate tensors to keep them in registers, and takes many
minutes for that.

Both kernels read tiles of `ROWS` x `BLOCKS` * 16 numbers, whose scales are one tile of cuBLASLt's layout. The matrix
may have any strides. Results equal `block_formats.quantize_blocks`, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from torchtitan.kernels.block_formats import SIGNS, SMALLEST_TENSOR_SCALE

ROWS, BLOCKS = 128, 4
TILE: dict[str, Any] = {"ROWS": ROWS, "BLOCKS": BLOCKS}
SURVEY_WARPS, PACK_WARPS = 4, 8


@triton.jit  # type: ignore[untyped-decorator]
def _load(x, M, N, row_stride, column_stride, ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile, (ROWS, BLOCKS * 16) float32, with zeros outside of the matrix."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCKS * 16 + tl.arange(0, BLOCKS * 16)
    places = tl.cast(rows, tl.int64)[:, None] * row_stride + tl.cast(columns, tl.int64)[None, :] * column_stride
    return tl.load(x + places, mask=(rows < M)[:, None] & (columns < N)[None, :], other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _hadamard(numbers, SIGNS: tl.constexpr, TOTAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Transforms the rows of a tile of TOTAL blocks: (TOTAL, 16)."""
    numbers = tl.reshape(numbers, (TOTAL, 16))
    negative = (SIGNS >> tl.arange(0, 16)) & 1
    numbers = numbers * tl.where(negative == 1, -0.25, 0.25)[None, :]
    numbers = _butterfly(numbers, 1, TOTAL)
    numbers = _butterfly(numbers, 2, TOTAL)
    numbers = _butterfly(numbers, 4, TOTAL)
    return _butterfly(numbers, 8, TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _butterfly(numbers, STEP: tl.constexpr, TOTAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replaces numbers of a block that are STEP apart by their sum and difference."""
    pairs = tl.permute(tl.reshape(numbers, (TOTAL * 8 // STEP, 2, STEP)), (0, 2, 1))
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (TOTAL, 16))


@triton.jit  # type: ignore[untyped-decorator]
def _survey(numbers, totals, SEED: tl.constexpr):  # type: ignore[no-untyped-def]
    """totals[0] becomes the bits of the amax: float32 numbers that are not negative have the same order as
    their bits, and NaN is larger than all. totals[1] becomes the sum of the bits of all numbers."""
    bits = tl.ravel(numbers.to(tl.int32, bitcast=True))
    tl.atomic_max(totals, tl.max(bits & 0x7FFFFFFF, 0), sem="relaxed")
    if SEED:
        tl.atomic_add(totals + 1, tl.sum(bits.to(tl.int64), 0).to(tl.int32), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def survey_kernel(  # type: ignore[no-untyped-def]
    x, totals, M, N, row_stride, column_stride,
    SEED: tl.constexpr, HADAMARD: tl.constexpr, BOTH: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """BOTH: totals[:2] is of x as it is, and totals[2:] of its transpose, transformed if HADAMARD."""
    numbers = _load(x, M, N, row_stride, column_stride, ROWS, BLOCKS)
    if BOTH:
        _survey(numbers, totals, SEED)
        numbers = tl.trans(numbers)
        totals += 2
    if HADAMARD:
        numbers = _hadamard(numbers, SIGNS, ROWS * BLOCKS)
    _survey(numbers, totals, SEED)


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _round(x):  # type: ignore[no-untyped-def]
    """Numbers from 0 to 2^22 to the nearest integers, ties to even: sums of this size have no fraction. (Triton's
    interpreter has no rint.)"""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _to_e4m3(x):  # type: ignore[no-untyped-def]
    """Numbers from 2^-9 to 448 to the nearest of the format. (The interpreter's cast rounds otherwise.)"""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power * 0.125, 2.0**-9)  # for NaN, the power is infinity
    return _round(tl.div_rn(x, step)) * step


@triton.jit  # type: ignore[untyped-decorator]
def nvfp4_pack_kernel(  # type: ignore[no-untyped-def]
    x, totals, data, scale, tensor_scale, M, N, row_stride, column_stride, SMALLEST: tl.constexpr,
    SQUARES: tl.constexpr, STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the data, scales and scale of the matrix of `packed_blocks.Packed`. Divisions follow IEEE 754, and
    what is rounded is clamped before: that keeps its multiplication from being fused with an addition."""
    numbers = _load(x, M, N, row_stride, column_stride, ROWS, BLOCKS)
    if HADAMARD:
        numbers = _hadamard(numbers, SIGNS, ROWS * BLOCKS)
    numbers = tl.reshape(numbers, (ROWS * BLOCKS, 16))
    largest = tl.load(totals).to(tl.float32, bitcast=True)
    of_matrix = tl.div_rn(largest, 448.0 * 6.0)
    of_matrix = tl.where(of_matrix < SMALLEST, SMALLEST, of_matrix)  # NaN stays; see `avoid_nan_instructions`
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(tensor_scale, of_matrix)

    amax = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if SQUARES:
        amax = tl.max(tl.reshape(amax, (ROWS // 16, 16, BLOCKS)), 1, keep_dims=True)
        amax = tl.reshape(tl.broadcast_to(amax, (ROWS // 16, 16, BLOCKS)), (ROWS * BLOCKS,))
    amax = amax.to(tl.float32, bitcast=True)
    of_blocks = tl.div_rn(tl.div_rn(amax, amax * 0 + 6.0), amax * 0 + of_matrix)
    of_blocks = tl.where(of_blocks > 448.0, 448.0, tl.where(of_blocks < 2.0**-9, 2.0**-9, of_blocks))
    of_blocks = _to_e4m3(of_blocks)
    factor = tl.div_rn(of_blocks * 0 + tl.div_rn(of_matrix * 0 + 1.0, of_matrix), of_blocks)

    exact = tl.clamp(numbers * factor[:, None], -6.0, 6.0)
    size = tl.abs(exact)
    # 1 / the step between numbers of this size, and the place of the first such number, less its size in steps.
    per_step = tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    offset = tl.where(size < 2, 0, tl.where(size < 4, 2, 4))
    within = tl.arange(0, 16)[None, :]
    block_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS * BLOCKS) // BLOCKS
    block_columns = tl.program_id(1) * BLOCKS + tl.arange(0, ROWS * BLOCKS) % BLOCKS
    if STOCHASTIC:
        position = (tl.cast(block_rows, tl.uint32) * tl.cast(N, tl.uint32))[:, None]
        position += tl.cast(block_columns * 16, tl.uint32)[:, None] + tl.cast(within, tl.uint32)
        seed = _hash(tl.load(totals + 1).to(tl.uint32, bitcast=True))
        noise = (_hash(position * 0x9E3779B9 + seed) >> 8).to(tl.float32) * 2.0**-24
        steps = exact * per_step
        low = tl.floor(steps)
        rounded = low + (steps - low > noise).to(tl.float32)
        negative = rounded < 0
        rounded = tl.abs(rounded)
    else:
        rounded = _round(size * per_step)
        negative = exact.to(tl.int32, bitcast=True) < 0
    code = (rounded.to(tl.int32) + offset) & 7 | tl.where(negative, 8, 0)
    packed = tl.sum(code.to(tl.int64) << (4 * within).to(tl.int64), 1)

    inside = (block_rows < M) & (block_columns * 16 < N)
    tl.store(data + tl.cast(block_rows, tl.int64) * (N // 16) + block_columns, packed, mask=inside)
    row = tl.arange(0, ROWS * BLOCKS) // BLOCKS
    tile = tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + tl.program_id(1)
    place = tile * (ROWS * BLOCKS) + row % 32 * 16 + row // 32 * 4 + tl.arange(0, ROWS * BLOCKS) % BLOCKS
    tl.store(scale + place, tl.where(inside, of_blocks, 0.0).to(tl.float8e4nv))


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], ROWS), triton.cdiv(x.shape[1], BLOCKS * 16)


def survey_nvfp4(x: torch.Tensor, seed: bool, hadamard: bool, both: bool) -> torch.Tensor:
    """See `packed_blocks._survey`; of a float32 or bfloat16 matrix."""
    totals = torch.zeros((2, 2) if both else 2, dtype=torch.int32, device=x.device)
    survey_kernel[_grid(x)](
        x, totals, *x.shape, *x.stride(), SEED=seed, HADAMARD=hadamard, BOTH=both, SIGNS=SIGNS, **TILE,
        num_warps=SURVEY_WARPS,
    )  # fmt: skip
    return totals


def pack_nvfp4(
    x: torch.Tensor, totals: torch.Tensor, out: Sequence[torch.Tensor], squares: bool, stochastic: bool, hadamard: bool
) -> None:
    """Writes the data, scales and scale of the matrix of `packed_blocks.Packed` to `out`. `totals` is from
    `survey_nvfp4`; with `squares`, blocks have 16 rows."""
    nvfp4_pack_kernel[_grid(x)](
        x, totals, *out, *x.shape, *x.stride(), SMALLEST=SMALLEST_TENSOR_SCALE, SQUARES=squares,
        STOCHASTIC=stochastic, HADAMARD=hadamard, SIGNS=SIGNS, **TILE, num_warps=PACK_WARPS,
    )  # fmt: skip
