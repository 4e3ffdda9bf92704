"""Quantizes matrices to 8 bits and dequantizes them on CPU, each in one pass over memory (`rounding.cpp`).

torch's operations need several passes, which take longer than the GEMM they prepare. They are the fallback where there
is no compiler. Matrices are (rows, columns); a scale is (rows, 1), (1, columns), (1, 1) or ().
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from torchtitan.kernels.cpp_extension import call, isa_flags, load_library
from torchtitan.kernels.dispatch import KERNELS, Kernel, device_type, find_kernel
from torchtitan.kernels.operator import operator

DTYPE_CODES = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
INT8_LARGEST = 127.0  # -128 is unused, which keeps the range symmetric
SMALLEST_SCALE = 1e-30  # scale inverse of an all-zero int8 row, which stays zero
SMALLEST_AMAX = 1e-12  # lower bound for float8 scales, as in torchao


class _Scale(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 2)]


@functools.cache
def rounding_library() -> ctypes.CDLL | None:
    """`rounding.cpp`; None if it cannot be compiled."""
    return load_library("rounding.cpp", "rounding to 8 bits", *isa_flags())


def on_cpu(x: torch.Tensor, *_: object) -> bool:
    """Whether the kernels for CPUs compute with x."""
    return device_type(x) == "cpu"


def amax(x: torch.Tensor) -> torch.Tensor:
    """(rows, 1) float32: the amax of each row; NaN if a row contains one."""
    result: torch.Tensor = find_kernel("amax", x)(x)
    return result


def amax_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, 1) and (1, columns) float32: the amax of each row and of each column."""
    rows, columns = find_kernel("amax of rows and columns", x)(x)
    return rows, columns


def round_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in an 8-bit format, rounded to nearest, ties to even; values beyond its range saturate."""
    return round_to_each(x, [scale], dtype)[0]


def round_to_each(x: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """`round_to` with one scale or two."""
    rounded: list[torch.Tensor] = find_kernel("rounding to 8 bits", x)(x, scales, dtype)
    return rounded


@operator("amax", lambda x: x.new_empty(x.shape[0], 1, dtype=torch.float32))
def _amax_cpu(x: torch.Tensor) -> torch.Tensor:
    if (kernels := _kernels_for(x)) is None:
        return _amax_by_torch(x)
    x, rows = x.contiguous(), _empty_amaxes(x)[0]
    call(kernels.amaxes, x, x.dtype == torch.float32, *x.shape, rows, None)
    return rows


@operator("amax_both", lambda x: _empty_amaxes(x))
def _amax_both_cpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if (kernels := _kernels_for(x)) is None:
        return amax_both_by_torch(x)
    x, (rows, columns) = x.contiguous(), _empty_amaxes(x)
    call(kernels.amaxes, x, x.dtype == torch.float32, *x.shape, rows, columns.zero_())
    return rows, columns


def _empty_amaxes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], 1, dtype=torch.float32), x.new_empty(1, x.shape[1], dtype=torch.float32)


@operator("round", lambda x, scales, dtype: [x.new_empty(x.shape, dtype=dtype) for _ in scales])
def _round_cpu(x: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    if (kernels := _kernels_for(x)) is None:
        return [_round_by_torch(x, scale, dtype).contiguous() for scale in scales]
    x, outs = x.contiguous(), [torch.empty(x.shape, dtype=dtype) for _ in scales]
    first, second, *_ = [*zip(outs, map(scale_struct, scales), strict=True), (None, _Scale())]
    call(kernels.round_scaled, x, x.dtype == torch.float32, *x.shape, DTYPE_CODES[dtype], *first, *second)
    return outs


def widen(data: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes data * scale to `out`, bfloat16 or float32. `data` and `out` are contiguous; scales are powers of two."""
    if (kernels := _kernels_for(data)) is None:
        return out.copy_(data.float() * scale)
    code, wide = DTYPE_CODES[data.dtype], out.dtype == torch.float32
    call(kernels.widen_scaled, data, *data.shape, code, scale_struct(scale), out, wide)
    return out


def scale_sums_kernel(
    sums: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """sums (int32) * row_scale * column_scale in bfloat16 or float32."""
    if (kernels := _kernels_for(sums)) is None:
        return (sums.float() * row_scale * column_scale).to(dtype)
    out = torch.empty(sums.shape, dtype=dtype)
    scales = scale_struct(row_scale), scale_struct(column_scale)
    call(kernels.scale_sums, sums, *sums.shape, *scales, out, dtype == torch.float32)
    return out


def _kernels_for(x: torch.Tensor) -> ctypes.CDLL | None:
    return None if x.dtype == torch.float16 else rounding_library()


def _amax_by_torch(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(1, keepdim=True).float()


def amax_both_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`amax_both` of (..., rows, columns)."""
    # Not -1 and -2: these have the same hash in Python, and the compiler would not see repetitions.
    magnitudes, last = x.abs(), x.dim() - 1
    return magnitudes.amax(last, keepdim=True).float(), magnitudes.amax(last - 1, keepdim=True).float()


def _round_by_torch(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exact = x.float() * scale
    if dtype == torch.int8:
        return exact.round().clamp(-INT8_LARGEST, INT8_LARGEST).to(dtype)
    largest = torch.finfo(dtype).max
    return exact.clamp(-largest, largest).to(dtype)


def _round_each_by_torch(x: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [_round_by_torch(x, scale, dtype) for scale in scales]


def scale_struct(scale: torch.Tensor) -> _Scale:
    rows, columns = scale.shape if scale.dim() == 2 else (1, 1)
    strides = (scale.stride(0) if rows > 1 else 0, scale.stride(1) if columns > 1 else 0)
    return _Scale(scale.data_ptr(), (ctypes.c_int64 * 2)(*strides))


_CPP = "rounding.cpp"
KERNELS["amax"] = [Kernel(_CPP, _amax_cpu, on_cpu), Kernel("torch's", _amax_by_torch)]
KERNELS["amax of rows and columns"] = [Kernel(_CPP, _amax_both_cpu, on_cpu), Kernel("torch's", amax_both_by_torch)]
KERNELS["rounding to 8 bits"] = [Kernel(_CPP, _round_cpu, on_cpu), Kernel("torch's", _round_each_by_torch)]
