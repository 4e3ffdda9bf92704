"""Linear layers with low-precision GEMMs, ordinary ones and experts'. `formats.py` says what is rounded, and how."""

from typing import Any

import torch
from torch import nn

from torchtitan.compat import torchao
from torchtitan.converters.formats import Amax, BothOperands, EightBit, Ends, Gather, Gemms
from torchtitan.converters.gather import GatheredTensor, grad_weight_of_shards, high_precision
from torchtitan.kernels.grouped_gemm import grouped_mm
from torchtitan.kernels.operator import Function
from torchtitan.kernels.quantize import Kept, quantize_once
from torchtitan.kernels.swiglu import swiglu
from torchtitan.kernels.swiglu_8bit import round_swiglu_gradients, rounds_swiglu_gradients
from torchtitan.models.moe import GroupedLinear

X, WEIGHT, GRAD_OUTPUT = range(3)


# Otherwise the compiler would trace into tensor subclasses (of FSDP's and tensor parallelism's low-precision
# all-gathers).
@torch.compiler.allow_in_graph
class LowPrecisionMatmul(Function):
    """x @ weight.T; with experts, each expert's rows of x with its weight. x: (..., K), weight: (N, K) or (E, N, K),
    out: (..., N).

    Saves x as the weight gradient needs it. The weight is rounded again in the backward pass: a saved copy would take
    memory even after FSDP has freed the gathered weight.

    Args:
        ends: (E,) int32, the ends of the experts' rows; None for one weight.
        low: x, rounded.
        weight_amax, grad_amax: with delayed scaling.
        kept: see `quantize_weight`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        ends: Ends,
        low: BothOperands,
        gemms: Gemms,
        weight_amax: Amax | None,
        grad_amax: Amax | None,
        kept: Kept | None,
    ) -> torch.Tensor:
        ctx.gemms, ctx.weight_amax, ctx.grad_amax, ctx.kept = gemms, weight_amax, grad_amax, kept
        ctx.shape, ctx.dtype = x.shape, x.dtype
        known = None
        if gemms.output:
            left = low.rows or gemms.x.round(x, ends, columns=False).rows
            columns_follow = gemms.grad_input and ctx.needs_input_grad[0]
            right, known = gemms.weight.round_weight(weight, columns_follow, weight_amax, kept)
            out: torch.Tensor = gemms.x.output(left, right, x.dtype, ends)  # type: ignore[arg-type]
        else:
            out = grouped_mm(x.flatten(0, -2), weight.mT, ends)
        ctx.operand = None if low.columns is None else type(low.columns)
        high, ctx.source = high_precision(x) if low.columns is None and ctx.needs_input_grad[1] else (None, None)
        saved = low.columns or (() if high is None else (high,))
        ctx.save_for_backward(weight, known, ends, low.ends, *saved)
        shaped: torch.Tensor = out.unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, known, ends, x_ends, *saved = ctx.saved_tensors
        gemms: Gemms = ctx.gemms
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad = grad if isinstance(grad, GatheredTensor) else grad.flatten(0, -2).contiguous()
        low_x, low_weight = needs_x and gemms.grad_input, needs_weight and gemms.grad_weight
        low = gemms.grad_output.round(grad, ends, low_x, low_weight, inputs=weight.shape[-1], amax=ctx.grad_amax)
        x_grad = weight_grad = None
        if low_x:
            right = gemms.weight.round_weight_again(weight, known, ctx.weight_amax, ctx.kept)
            x_grad = gemms.x.grad_input(low.rows, right, ctx.dtype, ends)  # type: ignore[arg-type]
        elif needs_x:
            x_grad = grouped_mm(grad, weight, ends)
        if low_weight:
            if ctx.operand is None:  # x was not rounded yet
                _, x, x_ends = gemms.x.round(saved[0], ends, rows=False)
            else:
                x = ctx.operand(*saved)
            weight_grad = gemms.x.grad_weight(low.columns, x, weight.dtype, x_ends)  # type: ignore[arg-type]
        elif needs_weight:
            weight_grad = grad_weight_of_shards(*high_precision(grad), saved[0], ctx.source, ends)
        return x_grad if x_grad is None else x_grad.view(ctx.shape), weight_grad, *[None] * 6


@torch.compiler.allow_in_graph
class SwiGLUMatmul(Function):
    """`LowPrecisionMatmul` of x = swiglu(gate, up), both (..., K), on a GPU. Their gradients are rounded where they are
    computed, for the GEMMs of the layers before, and so is x, for the weight gradient.

    Args:
        form: rowwise, of all tensors that the three layers multiply.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, gemms: Gemms, form: EightBit
    ) -> torch.Tensor:
        ctx.gemms, ctx.form = gemms, form
        rows = form.round(swiglu(gate, up), columns=False).rows
        right, known = gemms.weight.round_weight(weight, True, None, None)
        ctx.save_for_backward(gate, up, weight, known)
        out: torch.Tensor = form.output(rows, right, gate.dtype, None)  # type: ignore[arg-type]
        shaped: torch.Tensor = out.unflatten(0, gate.shape[:-1])
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight, known = ctx.saved_tensors
        gemms, form = ctx.gemms, ctx.form
        grad = grad if isinstance(grad, GatheredTensor) else grad.flatten(0, -2).contiguous()
        low = gemms.grad_output.round(grad, inputs=weight.shape[-1])
        x_grad = form.grad_input(low.rows, gemms.weight.round_weight_again(weight, known, None, None), gate.dtype, None)
        *both, x = round_swiglu_gradients(x_grad, gate.flatten(0, -2), up.flatten(0, -2), form.dtype)
        rows = gate.shape[:-1]
        grads = (
            GatheredTensor(
                [by_row.data.view(gate.shape), by_row.scale_inverse.view(*rows, 1), *by_column], form.scales, gate.dtype
            )
            for by_row, by_column in both
        )
        weight_grad = form.grad_weight(low.columns, x, weight.dtype, None) if ctx.needs_input_grad[2] else None
        return *grads, weight_grad, None, None


class AmaxHistory:
    """Delayed scaling of a layer. It belongs to the run, not to the model: it is not in buffers, so state dicts do not
    include it and allocating the model's memory does not clear it.

    Attributes:
        delayed: which of x, weight and grad_output have delayed scales.
        scales: (3,) float32.
        has_scales: whether the scales are known; until then all are dynamic. Changes only once, since compiled code
            depends on it.
        amaxes: amax of each tensor since the last step; 0 initially.
        history: (3, steps) float32, amaxes of previous steps, most recent first; 0 for none.
    """

    def __init__(self, delayed: tuple[bool, ...], steps: int, device: torch.device, has_scales: bool = False) -> None:
        self.delayed = delayed
        self.scales = torch.ones(3, device=device)
        self.has_scales = has_scales
        self.amaxes = tuple(torch.zeros((), device=device) for _ in range(3))
        self.history = torch.zeros(3, steps, device=device)

    def amax(self, tensor: int, trains: bool) -> Amax:
        """
        Args:
            trains: without gradients no amax is recorded, so validation does not affect training.
        """
        if not self.delayed[tensor]:
            return Amax(None, None)
        # A copy: the scales may change before the backward pass, which must use the same ones.
        scale = self.scales[tensor].clone() if self.has_scales else None
        return Amax(scale, self.amaxes[tensor] if trains else None)


class LowPrecisionLinear(nn.Linear):
    """A linear layer with low-precision GEMMs. Its weight is a plain parameter, or one that FSDP gathers in low
    precision. `quantized_weights` keeps it quantized while it does not change: the output layer runs once a chunk."""

    gemms: Gemms
    history: AmaxHistory | None
    quantized_weights: Kept | None = None
    takes_gate = False

    def gathers(self, overlaps: bool) -> tuple[Gather | None, Gather | None]:
        """`Gemms.gathers`, for `parallel.rounded_collectives`."""
        return self.gemms.gathers(overlaps) if self.history is None else (None, None)

    @classmethod
    def of(cls, linear: nn.Linear, gemms: Gemms, history: AmaxHistory | None = None) -> "LowPrecisionLinear":
        """A layer with the parameters of `linear`."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        new.gemms, new.history = gemms, history
        return new

    def forward(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Of x; of swiglu(x, up) if `takes_gate` and there is `up`."""
        gemms, trains, history = self.gemms, torch.is_grad_enabled(), self.history
        if up is not None:
            assert isinstance(gemms.x, EightBit)
            if trains and rounds_swiglu_gradients(x, gemms.x.dtype):
                return SwiGLUMatmul.apply(x, up, self.weight, gemms, gemms.x)
            x = swiglu(x, up)
        weight_amax = grad_amax = None
        if history is None:
            low = quantize_once(x, (gemms, trains), lambda x: gemms.round_input(x, None, trains))
        else:
            weight_amax, grad_amax = history.amax(WEIGHT, trains), history.amax(GRAD_OUTPUT, trains)
            with torch.no_grad():
                low = gemms.round_input(x, None, trains, history.amax(X, trains))
        kept = self.quantized_weights
        out = LowPrecisionMatmul.apply(x, self.weight, None, low, gemms, weight_amax, grad_amax, kept)
        return out if self.bias is None else out + self.bias


def join_swiglu(w1: nn.Module, w2: nn.Module, w3: nn.Module | None) -> None:
    """Lets w2 round the gradients of its SwiGLU for w1 and w3, if all GEMMs of the three are in one format that rounds
    tensors for each GEMM anew. Of a format with one scale for a tensor, both GEMMs use the same numbers."""
    layers = [layer for layer in (w2, w1, w3) if isinstance(layer, LowPrecisionLinear)]
    if len(layers) == 3 and all(layer.history is None and layer.bias is None for layer in layers):
        form = layers[0].gemms.x
        rowwise = isinstance(form, EightBit) and form.scales == "rowwise" and not form.emulate
        layers[0].takes_gate = rowwise and all(
            layer.gemms == Gemms(form, layer.gemms.weight, form) and layer.quantized_weights is None for layer in layers
        )


class LowPrecisionExperts(GroupedLinear):
    """A linear layer of each expert with low-precision GEMMs. Its parameters are plain ones."""

    gemms: Gemms

    @classmethod
    def of(cls, layer: GroupedLinear, gemms: Gemms) -> "LowPrecisionExperts":
        """A layer with the parameters of `layer`."""
        new = cls.with_weight_of(layer)
        new.gemms = gemms
        return new

    def matmul(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gemms, trains = self.gemms, torch.is_grad_enabled()
        # w1 and w3 share x. Its rows are sorted only one way, so the key need not contain the ends.
        low = quantize_once(x, (gemms, trains), lambda x: gemms.round_input(x, ends, trains))
        return LowPrecisionMatmul.apply(x, self.weight, ends, low, gemms, None, None, None)


class TorchaoExperts(GroupedLinear):
    """A linear layer of each expert with torchao's mxfp8 GEMMs, for Blackwell. Its parameters are plain ones."""

    scale_mode: str
    hp_weight_grad: bool  # the weight gradient stays in high precision
    kernels = "AUTO"

    @classmethod
    def of(cls, layer: GroupedLinear, scale_mode: str, hp_weight_grad: bool) -> "TorchaoExperts":
        """A layer with the parameters of `layer`."""
        new = cls.with_weight_of(layer)
        new.scale_mode, new.hp_weight_grad = scale_mode, hp_weight_grad
        return new

    def matmul(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torchao.grouped_mxfp8_mm(
            x,
            self.weight.transpose(1, 2),
            ends,
            out_dtype=x.dtype,
            kernel_preference=torchao.KernelPreference[self.kernels],
            wgrad_with_hp=self.hp_weight_grad,
            scale_calculation_mode=torchao.ScaleCalculationMode[self.scale_mode.upper()],
            pad_token_groups_for_grouped_mm=True,  # rows are padded to a multiple of 32
        )
        return out
