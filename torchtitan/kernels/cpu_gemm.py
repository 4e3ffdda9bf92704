"""GEMMs of 8-bit matrices on CPU.

Few CPUs have float8 GEMMs: oneDNN has them from AMX-FP16 on, and elsewhere `torch._scaled_mm` is a scalar loop, a
thousand times slower than bfloat16. But float8 numbers are bfloat16 numbers, and the sums of both GEMMs are float32: so
float8 data are multiplied in bfloat16, or in float32 where the CPU has no bfloat16 GEMM, with the same result at the
wider GEMM's speed. int8 data are multiplied by oneDNN where the CPU has int8 instructions, else in float32 over slices
of the sums that are too short to be rounded.

Shapes of a GEMM: (M, K) x (K, N).
"""

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan.kernels import rounding
from torchtitan.kernels.cpp_extension import load
from torchtitan.kernels.cpu_speed import fast_dtype, int8_is_fast, large_int8_numbers

ONE = torch.ones(())
EXACT_SUMS = 2**24 // 127**2  # products of int8 numbers that float32 adds without rounding


# Operators of their own: the profiler counts them, and the compiler calls them as they are.
@torch.library.custom_op("torchtitan::float8_mm", mutates_args=())
def float8_mm(
    a: torch.Tensor, a_scale_inverse: torch.Tensor, b: torch.Tensor, b_scale_inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a @ b: (M, K) and (K, N) to (M, N), in any strides, bfloat16 or float32.

    Scale inverses are one for each tensor, or powers of two for each row of a and each column of b: multiplying the
    operands by those rounds nothing.
    """
    wide = fast_dtype() if dtype == torch.bfloat16 else torch.float32
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    to = out if wide == dtype else _workspace("out", out.shape, wide)
    if a_scale_inverse.numel() == b_scale_inverse.numel() == 1:
        # alpha multiplies the float32 sums, before they are rounded to the dtype of the result.
        alpha = a_scale_inverse.item() * b_scale_inverse.item()
        torch.addmm(to[:1], _widen("a", a, ONE, wide), _widen("b", b, ONE, wide), beta=0, alpha=alpha, out=to)
    else:
        torch.mm(_widen("a", a, a_scale_inverse, wide), _widen("b", b, b_scale_inverse, wide), out=to)
    return out if to is out else out.copy_(to)


@torch.library.custom_op("torchtitan::int8_mm", mutates_args=())
def int8_mm(
    a: torch.Tensor, a_scale_inverse: torch.Tensor, b: torch.Tensor, b_scale_inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same of int8 data with int32 sums, and any scales."""
    (m, k), n = a.shape, b.shape[1]
    sides = b.is_contiguous() or b.t().is_contiguous()
    # oneDNN is the better one where sums are long and a lies across, as in weight gradients.
    if a.is_contiguous() and sides and k % 4 == 0 and (kernels := int8_library()) is not None:
        return _int8_gemm(kernels, a, a_scale_inverse, b, b_scale_inverse, dtype)
    sums = _workspace("out", (m, n), torch.int32)
    if int8_is_fast():
        torch._int_mm(a, b.contiguous(), out=sums)  # oneDNN is slower where the right one is transposed
    else:
        left, right = _widen("a", a, ONE, torch.float32), _widen("b", b, ONE, torch.float32)
        sums.zero_()
        for x, y in zip(left.split(EXACT_SUMS, 1), right.split(EXACT_SUMS), strict=True):
            sums += (x @ y).to(torch.int32)
    return rounding.scale_sums(sums, a_scale_inverse, b_scale_inverse, dtype)


@functools.cache
def int8_library() -> ctypes.CDLL | None:
    """`int8_gemm.cpp`, where it can run and oneDNN's own GEMM is not slow."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability() or not int8_is_fast():
        return None
    libraries = Path(torch.__file__).parent / "lib"
    source = Path(__file__).with_name("int8_gemm.cpp")
    loaded = load(source, "int8 GEMMs", "-march=x86-64-v4", f"-L{libraries}", "-ltorch_cpu")
    if loaded is None:
        return None
    loaded.int8_gemm_works.restype = ctypes.c_bool
    if not loaded.int8_gemm_works():
        return None
    # Without AMX the kernels of some versions take the left operand for unsigned.
    exact = large_int8_numbers(64, 64)
    low, one = exact.to(torch.int8), torch.ones(1, 1)
    right = torch.equal(_int8_gemm(loaded, low, one, low, one, torch.float32), exact @ exact)
    return loaded if right else None


def _int8_gemm(
    kernels: ctypes.CDLL,
    a: torch.Tensor,
    a_scale_inverse: torch.Tensor,
    b: torch.Tensor,
    b_scale_inverse: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=dtype)
    kernels.int8_gemm(
        rounding.pointer(a),
        rounding.pointer(b),
        not b.is_contiguous(),
        *map(ctypes.c_int64, (m, n, k)),
        rounding.scale_of(a_scale_inverse),
        rounding.scale_of(b_scale_inverse),
        rounding.pointer(out),
        dtype == torch.float32,
        rounding.pointer(_workspace("b", b.shape, torch.int8)),
        torch.get_num_threads(),
    )
    return out


_memory = threading.local()


def _workspace(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized, in memory that stays from call to call: new memory would cost more than what is written to it."""
    size = math.prod(shape) * dtype.itemsize
    buffer = getattr(_memory, name, None)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.uint8)
        setattr(_memory, name, buffer)
    return buffer[:size].view(dtype).view(shape)


def _widen(name: str, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`rounding.widen` into a workspace."""
    if data.is_contiguous():
        return rounding.widen(data, scale, _workspace(name, data.shape, dtype))
    if not data.t().is_contiguous():
        return _widen(name, data.contiguous(), scale, dtype)
    return _widen(name, data.t(), scale.t() if scale.dim() == 2 else scale, dtype).t()


def _result(a, a_scale_inverse, b, b_scale_inverse, dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


float8_mm.register_fake(_result)
int8_mm.register_fake(_result)


def cpu_kernel(operation: str) -> str:
    """What the operators above multiply by on this CPU, for a sentence; nothing for other operations."""
    if operation == "torchtitan::float8_mm":
        return f"; its float8 data are multiplied in {str(fast_dtype()).removeprefix('torch.')}"
    if operation == "torchtitan::int8_mm" and not int8_is_fast():
        return "; its int8 data are multiplied in float32, since this CPU has no fast int8 GEMM"
    return ""
