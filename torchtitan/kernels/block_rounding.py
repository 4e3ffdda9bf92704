"""Rounds to block-scaled formats on CPU, in few passes over memory (`block_rounding.cpp`).

The definition in `block_formats.py` takes about twenty, which is longer than the GEMM they prepare. It is the fallback
where there is no compiler. Tensors are (..., rows, columns), bfloat16 or float32.
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from torchtitan.kernels.cpp_extension import call, isa_flags, load_library

SIZE_NAMES = ("matrices", "rows", "columns", "block_rows", "block_columns")


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in SIZE_NAMES]


class _Element(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("lowest", "highest", "smallest", "step")]


@functools.cache
def block_rounding_library() -> ctypes.CDLL | None:
    """`block_rounding.cpp`; None if it cannot be compiled."""
    flags = "-ffp-contract=off", *isa_flags()  # an FMA would round differently
    kernels = load_library("block_rounding.cpp", "rounding to blocks", *flags)
    if kernels is not None:
        kernels.survey.restype = ctypes.c_uint32
    return kernels


def kernels_for(x: torch.Tensor) -> ctypes.CDLL | None:
    """The library for the functions below, if this tensor can use them."""
    return block_rounding_library() if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) else None


def survey_blocks(kernels: ctypes.CDLL, x: torch.Tensor, block: Sequence[int]) -> tuple[torch.Tensor, int]:
    """The amax of each block (of so many rows and columns) of the contiguous x, (..., blocks of rows,
    blocks of columns) float32, NaN if it contains a NaN; and the sum of the bits of all numbers in float32, modulo
    2^32."""
    (rows, columns), (block_rows, block_columns) = x.shape[-2:], block
    amax = torch.zeros(*x.shape[:-2], -(-rows // block_rows), -(-columns // block_columns))
    bits = call(kernels.survey, x, x.dtype == torch.float32, _shape(x, block), amax)
    return amax, bits


def round_blocks(
    kernels: ctypes.CDLL,
    x: torch.Tensor,
    block: Sequence[int],
    element: Sequence[float],
    factor: torch.Tensor,
    scale: torch.Tensor,
    seed: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The products of x and `factor`, rounded to numbers of the element type and multiplied by `scale`.

    Args:
        x: contiguous.
        element: lowest and highest number, smallest normal number, and the distance of numbers relative to the power of
            two below them.
        factor, scale: (..., blocks of rows, blocks of columns) float32, contiguous.
        seed: of the noise of stochastic rounding, the sum of `survey_blocks`; None rounds to nearest.
        dtype: of the result.
    """
    out = torch.empty(x.shape, dtype=dtype)
    numbers = x, x.dtype == torch.float32, _shape(x, block), _Element(*element)
    noise = seed is not None, ctypes.c_uint32(seed or 0)
    call(kernels.round_blocks, *numbers, factor, scale, *noise, out, dtype == torch.float32)
    return out


def hadamard_kernel(kernels: ctypes.CDLL, x: torch.Tensor, signs: int) -> torch.Tensor:
    """`block_formats.hadamard` of a contiguous x."""
    columns = x.shape[-1]
    out = torch.empty(*x.shape[:-1], -(-columns // 16) * 16)
    wide, rows = x.dtype == torch.float32, x.numel() // columns
    call(kernels.transform, x, wide, rows, columns, ctypes.c_uint32(signs), out)
    return out


def _shape(x: torch.Tensor, block: Sequence[int]) -> _Shape:
    rows, columns = x.shape[-2:]
    return _Shape(x.numel() // (rows * columns), rows, columns, *block)
