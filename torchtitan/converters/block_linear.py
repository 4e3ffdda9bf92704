"""Linear layers with GEMMs in block-scaled formats (`kernels/block_formats.py`): emulated on any device, or by a GPU's
product of such formats (`kernels/packed_blocks.py`).

Operands are rounded to blocks along the dimension that the GEMM sums over. Emulated, they are then multiplied in their
own dtype.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchtitan.converters.converter import EMULATED_BLOCKS, LayerGemms, ProfilerOp
from torchtitan.converters.linear import Scaled, with_parameters_of
from torchtitan.converters.numerics import Role
from torchtitan.kernels.block_formats import ELEMENTS, BlockFormat, known_error, quantize, round_to_blocks, times
from torchtitan.kernels.packed_blocks import Packed, block_mm, pack, pack_both
from torchtitan.kernels.quantize import quantize_once, quantize_weight

REAL_BLOCKS = ProfilerOp("torchtitan::block_mm")


class BlockGemms(NamedTuple):
    """How the three GEMMs are computed.

    Attributes:
        x, weight, out_grad: formats of a layer's three tensors.
        hadamard: transform both operands of the weight gradient, which sums over tokens.
        output, grad_weight: whether these GEMMs are in the format; else they stay in high precision.
        emulate: whether they are emulated.
    """

    x: BlockFormat
    weight: BlockFormat
    out_grad: BlockFormat
    hadamard: bool = False
    output: bool = True
    grad_weight: bool = True
    emulate: bool = True

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
            EMULATED_BLOCKS if self.emulate else REAL_BLOCKS,
            math.hypot(x, weight) if self.output else None,
            math.hypot(out_grad, weight),
            math.hypot(out_grad, x) if self.grad_weight else None,
        )


def scaled(operand: torch.Tensor, form: BlockFormat) -> Scaled:
    """A float32 operand, (rows, columns), in units of the element type."""
    blocks = quantize(operand, form)
    return Scaled(times(operand, blocks.factor, form), blocks.data, ELEMENTS[form.element].largest)


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


class PackedInput(NamedTuple):
    """x, (M, K), for the two GEMMs that use it. None: that GEMM uses x itself, or does not follow.

    left: left operand of the output GEMM.
    right: right operand of the weight-gradient GEMM.
    """

    left: Packed | None
    right: Packed | None


def pack_input(x: torch.Tensor, gemms: BlockGemms, trains: bool) -> PackedInput:
    """x: (..., K). `trains`: a backward pass follows."""
    x = x.flatten(0, -2)
    over_tokens = gemms.over_tokens(gemms.x)
    if not (trains and gemms.grad_weight):
        return PackedInput(pack(x, gemms.x) if gemms.output else None, None)
    return (
        PackedInput(*pack_both(x, gemms.x, over_tokens))
        if gemms.output
        else PackedInput(None, pack(x.t(), over_tokens))
    )


class PackedBlockMatmul(torch.autograd.Function):
    """x @ weight.T by the GPU's block-scaled product. x: (M, K), weight: (N, K), out: (M, N).

    Saves x as the weight-gradient GEMM needs it. The weight is packed again in the backward pass: a saved copy would
    take memory even after FSDP has freed the gathered weight.

    Args:
        low: x packed by `pack_input`.
    """

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, low: PackedInput, gemms: BlockGemms) -> torch.Tensor:
        ctx.gemms, ctx.dtype = gemms, x.dtype
        ctx.save_for_backward(weight, *(low.right or (x, None, None)))
        if low.left is None:
            return x @ weight.t()
        right = quantize_weight(weight, gemms.weight, lambda weight: pack(weight, gemms.weight))
        return block_mm(low.left, right, x.dtype)

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *x = ctx.saved_tensors
        gemms: BlockGemms = ctx.gemms
        x_grad = weight_grad = None
        rows = columns = None
        if all(ctx.needs_input_grad[:2]) and gemms.grad_weight:
            rows, columns = pack_both(out_grad, gemms.out_grad, gemms.over_tokens(gemms.out_grad))
        if ctx.needs_input_grad[0]:
            key = gemms.weight, "transposed"
            right = quantize_weight(weight, key, lambda weight: pack(weight.t(), gemms.weight))
            x_grad = block_mm(rows or pack(out_grad, gemms.out_grad), right, ctx.dtype)
        if ctx.needs_input_grad[1] and gemms.grad_weight:
            left = columns or pack(out_grad.t(), gemms.over_tokens(gemms.out_grad))
            weight_grad = block_mm(left, Packed(*x), weight.dtype)
        elif ctx.needs_input_grad[1]:
            weight_grad = out_grad.t() @ x[0]
        return x_grad, weight_grad, None, None


class BlockLinear(nn.Linear):
    """A linear layer with block-scaled GEMMs. Its weight is a plain parameter."""

    gemms: BlockGemms

    @classmethod
    def of(cls, linear: nn.Linear, gemms: BlockGemms) -> "BlockLinear":
        """A layer with the parameters of `linear`."""
        new = with_parameters_of(linear, cls)
        new.gemms = gemms
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self.gemms.emulate:
            out = BlockMatmul.apply(x.flatten(0, -2), self.weight, self.gemms)
        else:
            key = (self.gemms, torch.is_grad_enabled())
            low = quantize_once(x, key, lambda x: pack_input(x, *key))
            out = PackedBlockMatmul.apply(x.flatten(0, -2), self.weight, low, self.gemms)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias
