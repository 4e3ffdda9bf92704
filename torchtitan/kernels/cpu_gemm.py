"""GEMMs of 8-bit matrices on CPU.

Few CPUs have float8 GEMMs: oneDNN has them from AMX-FP16 on, and elsewhere `torch._scaled_mm` is a scalar loop, a
thousand times slower than bfloat16. But every float8 number is a bfloat16 number, and both GEMMs sum in float32. So
float8 data are multiplied in bfloat16, or in float32 if the CPU has no bfloat16 GEMM: same result, at the speed of the
wider GEMM. int8 data are multiplied by oneDNN if the CPU has int8 instructions, else in float32 over slices of K short
enough that no sum is rounded.

Shapes of a GEMM: (M, K) x (K, N).
"""

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence

import torch

from torchtitan.kernels import rounding
from torchtitan.kernels.cpp_extension import call, load_library
from torchtitan.kernels.cpu_speed import fast_dtype, int8_is_fast, large_int8_numbers
from torchtitan.kernels.operator import operator, traced
from torchtitan.kernels.quantize import Quantized
from torchtitan.registry import deferred

_int8_gemm_triton: Callable[..., torch.Tensor] = deferred("torchtitan.kernels.gemm_triton:int8_gemm")

ONE = torch.ones(())
EXACT_SUMS = 2**24 // 127**2  # int8 products that float32 sums without rounding


def empty_result(a: torch.Tensor, _: object, b: torch.Tensor, __: object, dtype: torch.dtype) -> torch.Tensor:
    """Of an 8-bit GEMM, uninitialized."""
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@operator("float8_mm", empty_result)
def float8_mm(
    a: torch.Tensor, a_scale_inverse: torch.Tensor, b: torch.Tensor, b_scale_inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a @ b: (M, K) x (K, N) to (M, N), with any strides; the result is bfloat16 or float32. Scale inverses are one per
    tensor, or powers of two per row of a and per column of b, so that multiplying the operands by them is exact."""
    wide = fast_dtype() if dtype == torch.bfloat16 else torch.float32
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    to = out if wide == dtype else _workspace("out", out.shape, wide)
    if a_scale_inverse.numel() == b_scale_inverse.numel() == 1:
        # alpha scales the float32 sums before they are rounded to the output dtype.
        alpha = a_scale_inverse.item() * b_scale_inverse.item()
        torch.addmm(to[:1], _widen("a", a, ONE, wide), _widen("b", b, ONE, wide), beta=0, alpha=alpha, out=to)
    else:
        torch.mm(_widen("a", a, a_scale_inverse, wide), _widen("b", b, b_scale_inverse, wide), out=to)
    return out if to is out else out.copy_(to)


@operator("int8_mm", empty_result)
def int8_mm(
    a: torch.Tensor, a_scale_inverse: torch.Tensor, b: torch.Tensor, b_scale_inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`float8_mm` for int8 data, with int32 sums and arbitrary scales. On a GPU a is row-major and b column-major."""
    if a.device.type == "cuda":
        return _int8_gemm_triton(a, a_scale_inverse, b, b_scale_inverse, dtype)
    (m, k), n = a.shape, b.shape[1]
    sides = b.is_contiguous() or b.t().is_contiguous()
    # oneDNN's own GEMM is faster where K is long and a is transposed, as in weight gradients.
    if a.is_contiguous() and sides and k % 4 == 0 and (kernels := int8_library()) is not None:
        return _int8_gemm(kernels, Quantized(a, a_scale_inverse), Quantized(b, b_scale_inverse), dtype)
    sums = _workspace("out", (m, n), torch.int32)
    if int8_is_fast():
        torch._int_mm(a, b.contiguous(), out=sums)  # oneDNN is slower with a transposed right operand
    else:
        left, right = _widen("a", a, ONE, torch.float32), _widen("b", b, ONE, torch.float32)
        sums.zero_()
        for x, y in zip(left.split(EXACT_SUMS, 1), right.split(EXACT_SUMS), strict=True):
            sums += (x @ y).to(torch.int32)
    return rounding.scale_sums_kernel(sums, a_scale_inverse, b_scale_inverse, dtype)


traced("int8_mm", functools.partial(_int8_gemm_triton, traced=True))


@functools.cache
def int8_library() -> ctypes.CDLL | None:
    """`int8_gemm.cpp`, if it can run here and oneDNN's int8 GEMM is fast; else None."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability() or not int8_is_fast():
        return None
    loaded = load_library(
        "int8_gemm.cpp", "int8 GEMMs", "-march=x86-64-v4", f"-L{torch.__path__[0]}/lib", "-ltorch_cpu"
    )
    if loaded is None:
        return None
    loaded.int8_gemm_works.restype = ctypes.c_bool
    if not loaded.int8_gemm_works():
        return None
    # Without AMX, the kernels of some versions treat the left operand as unsigned.
    exact = large_int8_numbers(64, 64)
    low = Quantized(exact.to(torch.int8), torch.ones(1, 1))
    return loaded if torch.equal(_int8_gemm(loaded, low, low, torch.float32), exact @ exact) else None


def _int8_gemm(kernels: ctypes.CDLL, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    (left, left_scale), (right, right_scale) = a, b
    (m, k), n = left.shape, right.shape[1]
    out, packed = torch.empty(m, n, dtype=dtype), _workspace("b", right.shape, torch.int8)
    scales = rounding.scale_struct(left_scale), rounding.scale_struct(right_scale)
    transposed = not right.is_contiguous()
    call(kernels.int8_gemm, left, right, transposed, m, n, k, *scales, out, dtype == torch.float32, packed)
    return out


_memory = threading.local()


def _workspace(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized buffer that is reused from call to call: allocating costs more than writing to it."""
    size = math.prod(shape) * dtype.itemsize
    buffer = getattr(_memory, name, None)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.uint8)
        setattr(_memory, name, buffer)
    return buffer[:size].view(dtype).view(shape)


def _widen(name: str, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`rounding.widen` into a workspace, keeping the memory layout of `data`."""
    if data.is_contiguous():
        return rounding.widen(data, scale, _workspace(name, data.shape, dtype))
    if not data.t().is_contiguous():
        return _widen(name, data.contiguous(), scale, dtype)
    return _widen(name, data.t(), scale.t() if scale.dim() == 2 else scale, dtype).t()


def cpu_kernel(operation: str) -> str:
    """For messages: which dtype the operators above multiply in on this CPU. "" for other operations."""
    if operation == "torchtitan::float8_mm":
        return f"; its float8 operands are multiplied in {str(fast_dtype()).removeprefix('torch.')}"
    if operation == "torchtitan::int8_mm" and not int8_is_fast():
        return "; its int8 operands are multiplied in float32, since this CPU has no fast int8 GEMM"
    return ""
