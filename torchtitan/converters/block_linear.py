"""Linear layers whose GEMMs are emulated in block-scaled formats (`kernels/block_formats.py`), on any device.

Operands are rounded to blocks along the dimension that the GEMM sums over, and multiplied in their own dtype.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchtitan.converters.linear import EMULATED_BLOCKS, LayerGemms, Scaled, with_parameters_of
from torchtitan.converters.numerics import Role
from torchtitan.kernels.block_formats import ELEMENTS, BlockFormat, known_error, quantize, round_to_blocks


class BlockGemms(NamedTuple):
    """How the three GEMMs are computed.

    Attributes:
        x, weight, out_grad: formats of a layer's three tensors.
        hadamard: transform both operands of the weight gradient, which sums over tokens.
        output, grad_weight: whether these GEMMs are emulated; else they stay in high precision.
    """

    x: BlockFormat
    weight: BlockFormat
    out_grad: BlockFormat
    hadamard: bool = False
    output: bool = True
    grad_weight: bool = True

    def over_tokens(self, form: BlockFormat) -> BlockFormat:
        """The format of x or out_grad, transposed, in the weight gradient."""
        return form._replace(hadamard=self.hadamard)

    def form_of(self, role: Role) -> BlockFormat:
        """The format of a tensor, as in the GEMM that it is rounded for first."""
        return {"input": self.x, "weight": self.weight, "out_grad": self.out_grad}[role]

    def known(self) -> LayerGemms:
        """How the profiler shows them, and their errors: those of both operands, which are independent."""
        x, weight, out_grad = map(known_error, (self.x, self.weight, self.out_grad))
        return LayerGemms(
            EMULATED_BLOCKS,
            math.hypot(x, weight) if self.output else None,
            math.hypot(out_grad, weight),
            math.hypot(out_grad, x) if self.grad_weight else None,
        )


def scaled(operand: torch.Tensor, form: BlockFormat) -> Scaled:
    """A float32 operand, (rows, columns), in units of the element type."""
    blocks = quantize(operand, form)
    return Scaled(operand * blocks.factors(), blocks.data, ELEMENTS[form.element].largest)


class BlockMatmul(torch.autograd.Function):
    """x @ weight.T. x: (M, K), weight: (N, K), out: (M, N)."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gemms: BlockGemms) -> torch.Tensor:
        ctx.gemms = gemms
        ctx.save_for_backward(x, weight)
        if not gemms.output:
            return x @ weight.t()
        return round_to_blocks(x, gemms.x) @ round_to_blocks(weight, gemms.weight).t()

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gemms: BlockGemms = ctx.gemms
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = round_to_blocks(out_grad, gemms.out_grad) @ round_to_blocks(weight.t(), gemms.weight).t()
        if ctx.needs_input_grad[1] and gemms.grad_weight:
            left = round_to_blocks(out_grad.t(), gemms.over_tokens(gemms.out_grad))
            weight_grad = left @ round_to_blocks(x.t(), gemms.over_tokens(gemms.x)).t()
        elif ctx.needs_input_grad[1]:
            weight_grad = out_grad.t() @ x
        return x_grad, weight_grad, None


class BlockLinear(nn.Linear):
    """A linear layer with emulated block-scaled GEMMs. Its weight is a plain parameter."""

    gemms: BlockGemms

    @classmethod
    def of(cls, linear: nn.Linear, gemms: BlockGemms) -> "BlockLinear":
        """A layer with the parameters of `linear`."""
        new = with_parameters_of(linear, cls)
        new.gemms = gemms
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = BlockMatmul.apply(x.flatten(0, -2), self.weight, self.gemms)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias
