"""GEMMs of operands in block-scaled formats (`block_formats.py`), on the GPUs that multiply them: nvfp4 and mxfp8 from
compute capability 10.0 on, float8 with scales of 128 numbers on 9.0.

- `pack_blocks`: an operand as `torch.nn.functional.scaled_mm` takes it.
- `block_mm`: the product of two. An operator, because the compiler of torch 2.13 knows neither its second level of
  scales nor their layout, and passes scales of 128 x 128 in another shape than `scaled_mm` takes; torch 2.11's does not
  know it at all.

Layouts of scales: NVIDIA's cuBLAS documentation, "1D block scaling factors layout" (nvfp4, mxfp8) and "128-element 1D
and 128x128 2D block scaling"; torch's checks are in aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from torchtitan.kernels.block_formats import BlockFormat, amax_of_blocks, scales
from torchtitan.kernels.operator import fused, operator
from torchtitan.registry import deferred

_fill_mx = deferred("torchtitan.kernels.mx_triton:pack_mx")
_fill_nvfp4 = deferred("torchtitan.kernels.nvfp4_triton:pack_nvfp4")
_survey_nvfp4: Callable[..., torch.Tensor] = deferred("torchtitan.kernels.nvfp4_triton:survey_nvfp4")

NVFP4_BLOCK, MX_BLOCK, FLOAT8_BLOCK = 16, 32, 128
# Type of scales -> sizes of operands that cuBLASLt takes; for mxfp8 and float8, whole blocks.
MULTIPLE_OF = {"e4m3": 32, "e8m0": MX_BLOCK, "float32": FLOAT8_BLOCK}


class Packed(NamedTuple):
    """An operand of a GEMM that sums over its columns, row-major.

    data: (rows, columns) float8_e4m3fn; or nvfp4, (rows, blocks) int64, whose 16 numbers of 4 bits are a block, the
        first one in the lowest bits.
    scale: float32 and column-major, for blocks of 1 x 128 (rows, blocks), for 128 x 128 (blocks of columns, filled up
        to a multiple of 4, blocks of rows); or nvfp4, float8_e4m3fn of blocks of 1 x 16, and mxfp8, float8_e8m0fnu of
        blocks of 1 x 32, in tiles of 128 rows and 4 blocks, in which rows 32 apart are neighbors. Incomplete tiles are
        filled up with zeros.
    tensor_scale: float32 scalar; None for float8 and mxfp8.
    """

    data: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None


def pack_blocks(x: torch.Tensor, form: BlockFormat) -> Packed:
    """Rounds (rows, columns), float32 or bfloat16, to the numbers of `block_formats.quantize_blocks`. Columns are
    filled up with zeros to a multiple of `MULTIPLE_OF`. Rows must be a multiple, too, except in a left operand."""
    missing = -x.shape[1] % MULTIPLE_OF[form.scale]
    if missing:
        x = F.pad(x, (0, missing))
    if form.scale == "float32":
        return _pack_float8(x, form)
    if form.scale == "e8m0":
        data, scale = _pack_mx(x, form.scale_mode, False)
        return Packed(data, scale, None)
    survey = _survey(x, form.stochastic, form.hadamard, False)
    return Packed(*_pack_nvfp4(x, survey, form.rows > 1, form.stochastic, form.hadamard))


def pack_both(x: torch.Tensor, form: BlockFormat, transposed: BlockFormat) -> tuple[Packed, Packed]:
    """`pack_blocks` of x and of its transpose, which reads x once less; `form` has no transform."""
    if form.scale == "float32" or any(size % MULTIPLE_OF[form.scale] for size in x.shape):
        return pack_blocks(x, form), pack_blocks(x.t(), transposed)
    if form.scale == "e8m0":
        data, scale, by_column, column_scale = _pack_mx(x, form.scale_mode, True)
        return Packed(data, scale, None), Packed(by_column, column_scale, None)
    surveys = _survey(x, form.stochastic, transposed.hadamard, True)
    by_row = Packed(*_pack_nvfp4(x, surveys[0], form.rows > 1, form.stochastic, False))
    return by_row, Packed(*_pack_nvfp4(x.t(), surveys[1], transposed.rows > 1, form.stochastic, transposed.hadamard))


@fused
def _pack_float8(x: torch.Tensor, form: BlockFormat) -> Packed:
    x = x.float()
    factor, scale, _ = scales(amax_of_blocks(x.abs(), form), form)
    by_row = factor.repeat_interleave(form.rows, 0) if form.rows > 1 else factor
    blocks = x.unflatten(1, (-1, FLOAT8_BLOCK)) * by_row.unsqueeze(2)
    largest = torch.finfo(torch.float8_e4m3fn).max
    data = blocks.clamp(-largest, largest).to(torch.float8_e4m3fn).flatten(1).contiguous()
    if form.rows > 1:
        return Packed(data, F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t(), None)
    return Packed(data, scale.t().contiguous().t(), None)


def _empty_mx(x: torch.Tensor, mode: str, both: bool) -> list[torch.Tensor]:
    packed = []
    for rows, columns in (x.shape, reversed(x.shape))[: 1 + both]:
        packed.append(x.new_empty(rows, columns, dtype=torch.float8_e4m3fn))
        packed.append(x.new_empty(-(-rows // 128) * -(-columns // 128) * 512, dtype=torch.float8_e8m0fnu))
    return packed


@operator("pack_mx", _empty_mx)
def _pack_mx(x: torch.Tensor, mode: str, both: bool) -> list[torch.Tensor]:
    """Data and scale of mxfp8; if `both`, then the same for the transpose."""
    packed = _empty_mx(x, mode, both)
    _fill_mx(x, mode, packed)
    return packed


@operator("survey_nvfp4", lambda x, *options: x.new_empty((2, 2) if options[-1] else (2,), dtype=torch.int32))
def _survey(x: torch.Tensor, stochastic: bool, transform: bool, both: bool) -> torch.Tensor:
    """What rounding a number needs to know of the whole matrix, (2,) int32: the bits of its amax, and the
    sum of its bits if `stochastic`. `both`: (2, 2), of x as it is, and of its transpose, transformed if `transform`."""
    return _survey_nvfp4(x, stochastic, transform, both)


def _empty_nvfp4(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    return (
        x.new_empty(rows, columns // NVFP4_BLOCK, dtype=torch.int64),
        x.new_empty(-(-rows // 128) * -(-columns // 64) * 512, dtype=torch.float8_e4m3fn),
        x.new_empty((), dtype=torch.float32),
    )


@operator("pack_nvfp4", _empty_nvfp4)
def _pack_nvfp4(
    x: torch.Tensor, survey: torch.Tensor, squares: bool, stochastic: bool, transform: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = _empty_nvfp4(x)
    _fill_nvfp4(x, survey, packed, squares, stochastic, transform)
    return packed


def block_mm(left: Packed, right: Packed, dtype: torch.dtype) -> torch.Tensor:
    """left @ right.T: (M, K) and (N, K) to (M, N)."""
    return _block_mm(*left, right.data.t(), *right[1:], dtype)


@operator(
    "block_mm",
    lambda left, _, __, right, *more: left.new_empty((left.shape[0], right.shape[1]), dtype=more[-1]),
)
def _block_mm(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    left_tensor_scale: torch.Tensor | None,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    right_tensor_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    layout: Any = SwizzleType.SWIZZLE_32_4_4
    if left_scale.dtype == torch.float8_e8m0fnu:
        of_32 = ScalingType.BlockWise1x32
        return F.scaled_mm(left, right, left_scale, of_32, right_scale, of_32, layout, layout, output_dtype=dtype)
    if left_tensor_scale is None or right_tensor_scale is None:
        of_rows = right_scale.shape == (right.shape[1], right.shape[0] // FLOAT8_BLOCK)
        recipe = ScalingType.BlockWise1x128 if of_rows else ScalingType.BlockWise128x128
        return F.scaled_mm(left, right, left_scale, ScalingType.BlockWise1x128, right_scale, recipe, output_dtype=dtype)
    left, right = _as_nvfp4(left), _as_nvfp4(right.t()).t()
    scales = [left_scale, left_tensor_scale], [right_scale, right_tensor_scale]
    recipes, layouts = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [layout, SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(left, right, scales[0], recipes, scales[1], recipes, layouts, layouts, output_dtype=dtype)


def _as_nvfp4(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8).view(torch.float4_e2m1fn_x2)
