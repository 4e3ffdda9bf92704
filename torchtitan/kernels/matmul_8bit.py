"""GEMMs of 8-bit matrices: a @ b with float32 or int32 sums, then scaling.

On a GPU these are `torch._scaled_mm` and the Triton kernel of `kernels.gemm_triton` (without Triton, `torch._int_mm`);
on CPU, the operators of `kernels.cpu_gemm`.

Shapes of a GEMM: (M, K) x (K, N).
"""

import torch
from torch.torch_version import TorchVersion

from torchtitan.compat.dynamo import is_compiling
from torchtitan.device import HAS_TRITON
from torchtitan.kernels.cpu_gemm import empty_result, float8_mm, int8_mm
from torchtitan.kernels.dispatch import SIMULATED
from torchtitan.kernels.operator import fused, operator
from torchtitan.kernels.quantize import Quantized
from torchtitan.kernels.rounding import on_cpu


def float8_matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, emulate: bool = False, fast: bool = False
) -> torch.Tensor:
    """a @ b: (M, K) x (K, N) to (M, N), with any strides.

    Scales are one per tensor, or one per row of a and per column of b. The latter must be powers of two
    (`powers_of_two`): on CPU they are multiplied into the operands, which is exact only then.

    Args:
        emulate: dequantize first and multiply in float32.
        fast: let a GPU accumulate in reduced precision, as torchao's recipes do for outputs.
    """
    if emulate:
        return emulated_float8_mm(*a, *b, dtype)
    if on_cpu(a.data):
        return float8_mm(*a, *b, dtype)
    left, right = _row_major(a.data), column_major(b.data)  # the layouts that cuBLASLt requires
    if a.scale_inverse.numel() == b.scale_inverse.numel() == 1:
        scales = (a.scale_inverse.reshape(()), b.scale_inverse.reshape(()))
        return torch._scaled_mm(left, right, *scales, out_dtype=dtype, use_fast_accum=fast)
    rows, columns = a.scale_inverse.expand(a.data.shape[0], 1), b.scale_inverse.expand(1, b.data.shape[1])
    if fast or _scales_rows_fast(left.device):  # torch 2.11's kernel with row scales has no float32 output
        scales = (rows.contiguous(), columns.contiguous())
        return torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast).to(dtype)
    # Scales are powers of two, so scaling the result in a second pass (as in torchao) leads to the same numbers.
    unscaled = torch.ones((), device=left.device)
    sums = torch._scaled_mm(left, right, unscaled, unscaled, out_dtype=torch.bfloat16)
    return (sums * (rows * columns)).to(dtype)


def _scales_rows_fast(device: torch.device) -> bool:
    """Whether the GEMM with row scales is fast with full accumulation, too. torch uses cuBLASLt's on Hopper, from 12.9
    on, and otherwise one of CUTLASS (ScaledBlas.cpp), which is slow before Blackwell."""
    if SIMULATED:
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return major > 9 or (major == 9 and TorchVersion(torch.version.cuda or "0") >= "12.9")


@operator("emulated_float8_mm", empty_result)
def emulated_float8_mm(
    a: torch.Tensor, a_scale_inverse: torch.Tensor, b: torch.Tensor, b_scale_inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(M, K) x (K, N) to (M, N), in float32."""
    return (Quantized(a, a_scale_inverse).dequantize() @ Quantized(b, b_scale_inverse).dequantize()).to(dtype)


def int8_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, emulate: bool = False) -> torch.Tensor:
    """a @ b: (M, K) x (K, N) to (M, N), with any strides. Scales per row of a and per column of b, or per tensor.
    Emulation sums in float64, which is as exact for int8 products as int32."""
    if emulate:
        sums = (a.data.double() @ b.data.double()).float()
        return sums.mul_(a.scale_inverse).mul_(b.scale_inverse).to(dtype)
    if on_cpu(a.data):
        return int8_mm(*a, *b, dtype)
    left, right = _row_major(a.data), column_major(b.data)
    if HAS_TRITON:
        return int8_mm(left, a.scale_inverse, right, b.scale_inverse, dtype)
    sums = torch._int_mm(left, right)
    return scale_sums(sums, a.scale_inverse, b.scale_inverse, dtype)


def matmul(a: Quantized, b: Quantized, dtype: torch.dtype, emulate: bool = False, fast: bool = False) -> torch.Tensor:
    """`int8_matmul` or `float8_matmul`."""
    if a.data.dtype == torch.int8:
        return int8_matmul(a, b, dtype, emulate)
    return float8_matmul(a, b, dtype, emulate, fast)


@fused
def scale_sums(
    sums: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(M, N) int32 sums times row scales and column scales."""
    return (sums.float() * row_scale * column_scale).to(dtype)


def as_right(b: Quantized) -> Quantized:
    """b, laid out as a GPU needs the right operand of a GEMM: better once, when it is quantized, than for each GEMM."""
    return b if on_cpu(b.data) else Quantized(column_major(b.data), b.scale_inverse)


def column_major(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix, or each of several, column-major in memory."""
    return _row_major(matrix.mT).mT


def _row_major(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix, or each of several, row-major in memory. Under torch.compile `contiguous` would be dropped and
    strides chosen freely, so it forces the stride order."""
    if is_compiling():
        forced: torch.Tensor = torch.ops.prims.inductor_force_stride_order.default(
            matrix, (matrix.shape[-2:].numel(), matrix.shape[-1], 1)[-matrix.dim() :]
        )
        return forced
    return matrix.contiguous()
