"""RMSNorm (arXiv 1910.07467)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.compat.dynamo import is_compiling
from torchtitan.kernels import pointwise
from torchtitan.kernels.dispatch import KERNELS, Kernel, find_kernel
from torchtitan.kernels.operator import Function


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * (weight + offset) over the last dimension, computed in at least float32."""

    def __init__(
        self, width: int, eps: float | None = None, offset: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(width, eps, dtype=dtype)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.offset:
            wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
            return rms_norm(x, wide + self.offset, self.eps).to(x.dtype)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """torch's RMSNorm, except on CPU, where torch composes it of many operations that save float32 copies of x."""
    out: torch.Tensor = find_kernel("rms_norm", x)(x, weight, eps)
    return out


class _RMSNorm(Function):
    """With n = x / rms, d = g * weight and gradient g: dx = (d - n mean(d * n)) / rms, dweight = sum(g * n)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, weight.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_().div_(x.shape[-1])
        inverse = mean.add_(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        if pointwise.applies_to(x, weight):
            x = x.contiguous()
            pointwise.run_kernel("norm", inverse.numel(), x.shape[-1], x, inverse, weight, out := torch.empty_like(x))
            return out
        normal: torch.Tensor = x.to(wide) * inverse
        return normal.mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        if pointwise.applies_to(grad, x, weight):
            x, grad, sizes = x.contiguous(), grad.contiguous(), (inverse.numel(), x.shape[-1])
            products = torch.empty(sizes)
            pointwise.run_kernel("norm_products", *sizes, grad, x, inverse, products)
            means, x_grad = products.mv(weight.float()).div_(x.shape[-1]), torch.empty_like(x)
            pointwise.run_kernel("norm_gradient", *sizes, grad, x, inverse, weight, means, x_grad)
            return x_grad, products.sum(0).to(weight.dtype), None
        grad, wide_weight = grad.to(inverse.dtype), weight.to(inverse.dtype)
        normal = x.to(inverse.dtype) * inverse
        products = (grad * normal).flatten(0, -2)
        means = products.mv(wide_weight).div_(x.shape[-1]).view_as(inverse)
        x_grad = (grad * wide_weight).addcmul_(normal, means, value=-1).mul_(inverse)
        return x_grad.to(x.dtype), products.sum(0).to(weight.dtype), None


# Compiled code does not use ours, since the compiler fuses a better one.
_OWN = Kernel("torchtitan's for CPUs", _RMSNorm.apply, lambda x: x.device.type == "cpu" and not is_compiling())
_TORCHS = Kernel("torch's", lambda x, weight, eps: F.rms_norm(x, (x.shape[-1],), weight, eps))
KERNELS["rms_norm"] = [_OWN, _TORCHS]
