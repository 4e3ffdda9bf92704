"""GEMMs of 8-bit matrices: a @ b with float32 or int32 sums, then the scales.

On a GPU they are `torch._scaled_mm` and `torch._int_mm`, on CPU the operators of `kernels.cpu_gemm`.

Shapes of a GEMM: (M, K) x (K, N).
"""

import torch

from torchtitan.kernels import rounding
from torchtitan.kernels.cpu_gemm import float8_mm, int8_mm
from torchtitan.kernels.quantize import fused
from torchtitan.kernels.quantized import Quantized


def float8_matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, emulate: bool = False, fast: bool = False
) -> torch.Tensor:
    """a @ b: (M, K) and (K, N) to (M, N), in any strides.

    Scales are one for each tensor, or one for each row of a and each column of b. Those must be powers of two
    (`powers_of_two`): on CPU they multiply the operands, which rounds nothing then.

    Args:
        emulate: multiply in float32 what is dequantized before.
        fast: a GPU may keep sums in fewer bits, as torchao's recipes have it for outputs.
    """
    if emulate:
        return (a.dequantize() @ b.dequantize()).to(dtype)
    if rounding.has_own_kernel(a.data):
        return float8_mm(a.data, a.scale_inverse, b.data, b.scale_inverse, dtype)
    left, right = _row_major(a.data), _row_major(b.data.t()).t()  # the layouts that cuBLASLt takes
    if a.scale_inverse.numel() == b.scale_inverse.numel() == 1:
        scales = (a.scale_inverse.reshape(()), b.scale_inverse.reshape(()))
        return torch._scaled_mm(left, right, *scales, out_dtype=dtype, use_fast_accum=fast)
    rows, columns = a.scale_inverse.expand(a.data.shape[0], 1), b.scale_inverse.expand(1, b.data.shape[1])
    if fast:  # the kernel with scales of rows knows no float32 result
        scales = (rows.contiguous(), columns.contiguous())
        return torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True).to(dtype)
    # Without fast sums that kernel is slow; scaling afterwards is a pass over the result (as in torchao).
    one = torch.ones((), device=left.device)
    sums = torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
    return (sums * (rows * columns)).to(dtype)


def int8_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, emulate: bool = False) -> torch.Tensor:
    """a @ b: (M, K) and (K, N) to (M, N), in any strides; scales of rows of a and columns of b, or of tensors.

    Emulated, the sums are float64, which holds every sum of int8 products exactly as int32 does.
    """
    if emulate:
        sums = (a.data.double() @ b.data.double()).float()
        return sums.mul_(a.scale_inverse).mul_(b.scale_inverse).to(dtype)
    if rounding.has_own_kernel(a.data):
        return int8_mm(a.data, a.scale_inverse, b.data, b.scale_inverse, dtype)
    sums = torch._int_mm(_row_major(a.data), _row_major(b.data.t()).t())
    return scale_sums(sums, a.scale_inverse, b.scale_inverse, dtype)


@fused
def scale_sums(
    sums: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(M, N) int32 sums times the scales of rows and columns."""
    return (sums.float() * row_scale * column_scale).to(dtype)


def _row_major(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrix, row after row in memory. The compiler would drop `contiguous` and choose the strides itself."""
    if torch.compiler.is_compiling():
        return torch.ops.prims.inductor_force_stride_order.default(matrix, (matrix.shape[1], 1))
    return matrix.contiguous()
