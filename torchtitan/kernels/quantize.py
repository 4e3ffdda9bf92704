"""Quantization to int8 and float8, and dequantization."""

import struct
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from torchtitan.compat.dynamo import is_compiling
from torchtitan.device import HAS_TRITON
from torchtitan.kernels import rounding
from torchtitan.kernels.dispatch import KERNELS, Kernel, find_kernel
from torchtitan.kernels.operator import fused, operator, triton_has
from torchtitan.kernels.rounding import SMALLEST_AMAX, SMALLEST_SCALE
from torchtitan.registry import deferred

_round_rows_triton: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
_round_rows_triton = deferred("torchtitan.kernels.rounding_triton:round_rows_triton")
LARGEST = rounding.INT8_LARGEST
WIDEST = 2**14  # columns of a matrix that `round_rows_triton` takes: a row must fit the registers of a block of threads

R = TypeVar("R")
ScaleRecipe = Literal["rowwise", "tensorwise", "tensorwise power of two"]
"""rowwise: one scale per row of a left operand and per column of a right one; of float8, powers of two. tensorwise: one
scale per matrix."""


class Quantized(NamedTuple):
    """int8 or float8 `data` and their float32 `scale_inverse`; dequantized: data * scale_inverse.

    Everything that is gathered or saved for the backward pass has this type. A scale that a recipe stores elsewhere may
    change in the meantime; the scale of the data must not.

    data: (..., rows, columns); scale_inverse: (..., rows, 1), (..., 1, columns), (1, 1) or ().
    """

    data: torch.Tensor
    scale_inverse: torch.Tensor

    def transpose(self) -> "Quantized":
        """A view."""
        scale_inverse = self.scale_inverse
        return Quantized(self.data.mT, scale_inverse.mT if scale_inverse.dim() else scale_inverse)

    def flatten(self) -> "Quantized":
        """The rows of all matrices as those of one, with their own scales or the only one; a view."""
        scale_inverse = self.scale_inverse
        flat = scale_inverse.flatten(0, -2) if scale_inverse.dim() > 2 else scale_inverse
        return Quantized(self.data.flatten(0, -2), flat)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.data.float() * self.scale_inverse).to(dtype)


_NOTHING: tuple[Any, ...] = (lambda: None,)
_last = _NOTHING


def _forget(reference: object) -> None:
    """Frees what was made of a tensor together with it: the last layer's would stay through the update."""
    global _last
    if _last[0] is reference:
        _last = _NOTHING


def quantize_once(x: torch.Tensor, key: object, make: Callable[[torch.Tensor], R]) -> R:
    """make(x), cached for the last x and key: wq, wk and wv share their input, and so do w1 and w3. No gradients flow
    through it. Under torch.compile there is no cache: the compiler removes repetitions itself."""
    global _last
    if is_compiling():
        with torch.no_grad():
            return make(x)
    if _last[0]() is not x or _last[1:3] != (x._version, key):
        with torch.no_grad():
            _last = (weakref.ref(x, _forget), x._version, key, make(x))
    made: R = _last[3]
    return made


Kept = dict[Any, Any]
"""Quantized weights by memory and key, while no weight changes."""


def quantize_weight(weight: torch.Tensor, key: Any, make: Callable[[torch.Tensor], R], kept: Kept | None) -> R:
    """make(weight), or what `kept` has for the same memory and key."""
    if kept is None or is_compiling():
        return make(weight)
    key = (weight.untyped_storage()._cdata, weight.storage_offset(), weight.shape, key)
    if key not in kept:
        kept[key] = make(weight), weight  # the weight, so that nothing else gets its memory
    made: R = kept[key][0]
    return made


@fused
def quantize(x: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype = torch.int8) -> Quantized:
    """Rounds (rows, columns) to 8 bits, with one scale per row, or one for the matrix."""
    amax = rounding.amax(x)
    return _round(x, amax if recipe == "rowwise" else amax.amax(), recipe, dtype)


@fused
def quantize_columns(x: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype = torch.int8) -> Quantized:
    """`quantize` with one scale per column instead of per row."""
    return _round(x, rounding.amax_both(x)[1], recipe, dtype) if recipe == "rowwise" else quantize(x, recipe, dtype)


@fused
def quantize_columns_again(
    data: torch.Tensor, scale_inverse: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype
) -> Quantized:
    """`quantize_columns` of float8 numbers that were rounded by row. Both scales are powers of two, so that only the
    smallest numbers of the format are rounded twice."""
    return quantize_columns(Quantized(data, scale_inverse).dequantize(), recipe, dtype)


@fused
def quantize_both(x: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype = torch.int8) -> tuple[Quantized, Quantized]:
    """`quantize` and `quantize_columns`. With one scale, both are the same."""
    if recipe != "rowwise":
        once = quantize(x, recipe, dtype)
        return once, once
    (rows, row_inverse), (columns, column_inverse) = (scale_by(a, recipe, dtype) for a in rounding.amax_both(x))
    by_row, by_column = rounding.round_to_each(x, [rows, columns], dtype)
    return Quantized(by_row, row_inverse), Quantized(by_column, column_inverse)


@fused
def quantize_rows(
    x: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype = torch.int8
) -> tuple[Quantized, torch.Tensor | None]:
    """`quantize`, and the scale inverse of `quantize_columns`: with it, `quantize_with` rounds to the same data, and
    reads x once less. None: with one float8 scale, whose inverse is rounded, it would not."""
    if recipe == "rowwise":
        return round_rows(x, dtype)
    rows = quantize(x, recipe, dtype)
    return rows, rows.scale_inverse if dtype == torch.int8 else None


def has_triton_kernels(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether our kernels for GPUs round x to this format."""
    return x.device.type == "cuda" and HAS_TRITON and triton_has(dtype, x.device)


def round_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[Quantized, torch.Tensor]:
    """Rounds matrices, (..., rows, columns), to int8 or float8_e4m3fn, with a scale for each row; and the scale
    inverses for each column, (..., 1, columns), which on a GPU do not take another pass."""
    data, scale_inverse, by_column = find_kernel("rounding of rows", x, dtype)(x, dtype)
    return Quantized(data, scale_inverse), scale_inverse_of(by_column, dtype)


def _round_rows_in_two_passes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    by_row, by_column = rounding.amax_both(x) if x.dim() == 2 else rounding.amax_both_by_torch(x)
    scale_inverse = scale_inverse_of(by_row, dtype)
    return rounding.round_to(x, scale_inverse.reciprocal(), dtype), scale_inverse, by_column


@fused
def quantize_with(x: torch.Tensor, scale_inverse: torch.Tensor, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Rounds x with a given scale; returns the data."""
    scale = scale_inverse.reciprocal()
    # A scale in another shape, or the compiler would take this for the rounding of `quantize`, and keep its result.
    return rounding.round_to(x, scale.reshape(1, 1) if scale.numel() == 1 else scale, dtype)


@fused
def dequantize(data: torch.Tensor, scale_inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Quantized(data, scale_inverse).dequantize(dtype)


def _round(x: torch.Tensor, amax: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype) -> Quantized:
    scale, scale_inverse = scale_by(amax, recipe, dtype)
    return Quantized(rounding.round_to(x, scale, dtype), scale_inverse)


def scale_by(amax: torch.Tensor, recipe: ScaleRecipe, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales for these amaxes, and their inverses. Of int8 the inverse is exact, of float8 the scale; both
    are if float8 scales are powers of two."""
    if dtype == torch.int8:
        scale_inverse = (amax / LARGEST).clamp_min(SMALLEST_SCALE)
        return _computed_once(scale_inverse.reciprocal()), scale_inverse
    if recipe != "tensorwise":
        scale, scale_inverse = float8_powers_of_two(amax, dtype)
        return _computed_once(scale), scale_inverse
    scale = float8_scale(amax, dtype)
    return scale, scale.reciprocal()


def _computed_once(scale: torch.Tensor) -> torch.Tensor:
    """The same scales. Those of columns, (1, columns), are then in memory in compiled code for a GPU, which would
    compute them again for each number and, where that takes many operations, write float32 products with them first."""
    if not is_compiling() or rounding.on_cpu(scale) or scale.shape[:-1] != (1,):
        return scale
    stored: torch.Tensor = torch.ops.prims.inductor_force_stride_order.default(scale, scale.stride())
    return stored


def _empty_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *matrices, rows, columns = x.shape
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(*matrices, rows, 1, dtype=torch.float32),
        x.new_empty(*matrices, 1, columns, dtype=torch.float32),
    )


@operator("round_rows", _empty_rows)
def _round_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _round_rows_triton(x.contiguous(), dtype)


KERNELS["rounding of rows"] = [
    Kernel("rounding_triton.py", _round_rows, lambda x, dtype: has_triton_kernels(x, dtype) and x.shape[-1] <= WIDEST),
    Kernel("two passes", _round_rows_in_two_passes),
]


def scale_inverse_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverses of scales of rows or columns with these amaxes."""
    return scale_by(amax, "rowwise", dtype)[1]


def float8_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float32 scale that maps `amax` to the largest number of the format."""
    # In float64, as torchao does it: compiled and eager code then agree.
    return (torch.finfo(dtype).max / amax.double().clamp_min(SMALLEST_AMAX)).float()


def bits_of(number: float) -> int:
    """Of a float32 number that is not negative."""
    return int.from_bytes(struct.pack(">f", number), "big")


EXPONENT, MANTISSA = 0x7F800000, 0x007FFFFF  # bits of float32
BITS_OF_ONE, BITS_OF_SMALLEST = bits_of(1.0), bits_of(SMALLEST_AMAX)
BITS_OF_LARGEST = {dtype: bits_of(torch.finfo(dtype).max) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}


def float8_powers_of_two(amax: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`float8_scale` of float32 amaxes, rounded down by `powers_of_two`, and the inverses; equal to these in every bit.

    Compilers compute scales again for each number that they round, where a float64 division would take longest. It is
    not needed: with m the mantissa of the format's largest number, 1.75 in both formats, the quotient m * 2**a / amax
    is rounded down to 2**(a - b) for amaxes in (m * 2**(b - 1), m * 2**b].
    """
    most = BITS_OF_LARGEST[dtype]
    bits = amax.view(torch.int32).clamp_min(BITS_OF_SMALLEST)
    # Mantissas above that of the largest number carry into the exponent.
    inverse = ((bits + (MANTISSA - (most & MANTISSA))) & EXPONENT) - ((most & EXPONENT) - BITS_OF_ONE)
    scale = 2 * BITS_OF_ONE - inverse
    # Infinity and NaN come out as the division has them.
    infinite, nan = amax == torch.inf, amax.isnan()
    scale = scale.masked_fill(infinite, 0).masked_fill(nan, EXPONENT)
    inverse = inverse.masked_fill(infinite, EXPONENT).masked_fill(nan, 0)
    return scale.view(torch.float32), inverse.view(torch.float32)


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Rounds float32 scales down to powers of two, by clearing their mantissas."""
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32)


def round_to_float8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """x * scale in float8, with the inverse of that scale; values beyond the range of the format saturate."""
    return Quantized(rounding.round_to(x, scale, dtype), scale.reciprocal())
