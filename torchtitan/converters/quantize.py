"""Rounding to int8 and back, and products of int8 matrices."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from torchtitan.converters.quantized import Quantized
from torchtitan.parallel.compile import has_cpp_compiler

LARGEST = 127.0  # -128 is left out: the range is symmetric
SMALLEST_SCALE = 1e-30  # scale inverse of a row of zeros, which stays zeros

R = TypeVar("R")
ScaleRecipe = Literal["rowwise", "tensorwise"]
"""One scale for each row of a matrix, or one for the whole."""


def fused(function: Callable[..., R]) -> Callable[..., R]:
    """`function` as one pass over its data: compiled where there is a compiler, since eagerly it would be seven.

    Gradients do not flow through it.
    """
    compiled: list[Callable[..., R]] = []

    @functools.wraps(function)
    def run(*arguments: Any) -> R:
        if torch.compiler.is_compiling():  # part of a larger compilation already
            return function(*arguments)
        if not compiled:
            able = torch.cuda.is_available() or has_cpp_compiler()
            compiled.append(torch.compile(function, dynamic=True) if able else function)
        # Parameters, leaves and results look alike to the compiler like this, so it compiles once for all.
        with torch.no_grad():
            return compiled[0](*(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))

    return run


@fused
def quantize(x: torch.Tensor, recipe: ScaleRecipe) -> Quantized:
    """Rounds (rows, columns) to the nearest int8 numbers."""
    amax = x.abs().amax(1, keepdim=True).float()
    if recipe == "tensorwise":
        amax = amax.amax(0, keepdim=True)
    scale_inverse = (amax / LARGEST).clamp_min(SMALLEST_SCALE)
    return Quantized(quantize_with(x, scale_inverse), scale_inverse)


@fused
def quantize_with(x: torch.Tensor, scale_inverse: torch.Tensor) -> torch.Tensor:
    """The int8 data of x at a given scale."""
    return (x.float() / scale_inverse).round().clamp(-LARGEST, LARGEST).to(torch.int8)


@fused
def quantize_transposed(x: torch.Tensor, recipe: ScaleRecipe) -> Quantized:
    """`quantize(x.T)`: the data contiguous, with a scale for each column of x."""
    data, scale_inverse = quantize(x.T, recipe)
    return Quantized(data.contiguous(), scale_inverse)


@fused
def dequantize(data: torch.Tensor, scale_inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Quantized(data, scale_inverse).dequantize(dtype)


def int8_matmul(a: Quantized, b_transposed: Quantized, emulate: bool, dtype: torch.dtype) -> torch.Tensor:
    """a @ b, where b is given by its transpose: (m, k) and (n, k) to (m, n).

    Emulated, the sums are float64, which holds every sum of int8 products exactly as int32 does.
    """
    if emulate:
        product = (a.data.double() @ b_transposed.data.double().T).float()
    else:
        product = torch._int_mm(a.data, b_transposed.data.T)
    return _scale_back(product, a.scale_inverse, b_transposed.scale_inverse.T, dtype)


@fused
def _scale_back(
    product: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return (product.float() * row_scale * column_scale).to(dtype)
