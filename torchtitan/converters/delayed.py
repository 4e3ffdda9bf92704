"""Linear layers in float8 whose scales are known before their numbers are: delayed scaling.

A dynamic scale needs the largest magnitude (amax) of a tensor before its first number can be rounded. A delayed one
comes from the amaxes of the steps before (NVIDIA's Transformer Engine), so rounding and looking for this step's amax
are one pass over the data. `histories.py` makes scales of amaxes after each step.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from torchtitan.converters.quantized import Quantized

INPUT, WEIGHT, OUT_GRAD = range(3)


class Casts(NamedTuple):
    """How the three operands of a layer's products (input, weight, gradient of the output) are rounded.

    delayed: by a delayed scale, else by a dynamic one.
    """

    delayed: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    emulate: bool


def round_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """x * scale in float8, with the inverse of this very scale; what is beyond the format saturates."""
    return Quantized(to_fp8_saturated(x.float() * scale, dtype), scale.reciprocal())


def product(a: Quantized, b: Quantized, emulate: bool, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """a @ b: (m, k) and (k, n) to (m, n). Emulated it is a product of float32.

    Args:
        fast: sums may be kept in fewer bits, as torchao's recipes have it for outputs.
    """
    if emulate:
        return (a.dequantize() @ b.dequantize()).to(dtype)
    return torch._scaled_mm(  # wants rows of the left and columns of the right operand in memory
        a.data.contiguous(),
        b.data.t().contiguous().t(),
        scale_a=a.scale_inverse,
        scale_b=b.scale_inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class DelayedMatmul(torch.autograd.Function):
    """x @ weight.T in float8. x: (tokens, k), weight: (n, k), out: (tokens, n).

    For the backward pass it keeps x in float8 with its scale inverse, and the scales that this pass has begun with, so
    that its gradient is theirs, whatever becomes of the layer's. The weight is rounded again: in float8 it would lie
    beside the one that FSDP frees.

    Args:
        scales: (3,) of input, weight and output gradient, float32; None where there are none yet: all are dynamic.
        amaxes: 0-dimensional, of the same three; raised to what is seen. None: nothing is recorded.
    """

    @staticmethod
    def forward(ctx, x, weight, scales, amax_input, amax_weight, amax_out_grad, casts):  # type: ignore[no-untyped-def, override]
        # Copies: the layer's own are filled anew after each step.
        known = [scales[i].clone() if scales is not None and casts.delayed[i] else None for i in range(3)]
        x_scale = _scale(x, known[INPUT], amax_input, casts.dtypes[INPUT])
        weight_scale = _scale(weight, known[WEIGHT], amax_weight, casts.dtypes[WEIGHT])
        x_low = round_to(x, x_scale, casts.dtypes[INPUT])
        weight_low = round_to(weight, weight_scale, casts.dtypes[WEIGHT])
        ctx.save_for_backward(*x_low, weight, weight_scale, known[OUT_GRAD])
        ctx.amax_out_grad = amax_out_grad  # to write to, so it may have changed
        ctx.casts = casts
        ctx.dtype = x.dtype
        return product(x_low, Quantized(weight_low.data.t(), weight_low.scale_inverse), casts.emulate, x.dtype, True)

    @staticmethod
    def backward(ctx, out_grad):  # type: ignore[no-untyped-def, override]
        x_data, x_scale_inverse, weight, weight_scale, scale = ctx.saved_tensors
        casts = ctx.casts
        scale = _scale(out_grad, scale, ctx.amax_out_grad, casts.dtypes[OUT_GRAD])
        out_low = round_to(out_grad, scale, casts.dtypes[OUT_GRAD])
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = product(out_low, round_to(weight, weight_scale, casts.dtypes[WEIGHT]), casts.emulate, ctx.dtype)
        if ctx.needs_input_grad[1]:
            out_columns = Quantized(out_low.data.t(), out_low.scale_inverse)
            weight_grad = product(out_columns, Quantized(x_data, x_scale_inverse), casts.emulate, weight.dtype)
        return x_grad, weight_grad, None, None, None, None, None


def _scale(
    x: torch.Tensor, known: torch.Tensor | None, record: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The scale for x: the known one, or else its own. Its amax is recorded."""
    if known is not None and record is None:
        return known
    amax = x.abs().amax().float()
    if record is not None:
        record.copy_(torch.maximum(record, amax))
    return amax_to_scale(amax, dtype) if known is None else known


class DelayedLinear(nn.Linear):
    """A linear layer in float8. Its weight is a plain parameter, in whatever precision it is given.

    What it remembers is the run's, not the model's: no buffers, so neither in state dicts nor emptied with the model's
    memory.

    Attributes:
        scales: (3,) float32, of input, weight and output gradient.
        has_scales: whether they are known; until then all are dynamic. It changes once, since compiled code depends
            on it.
        amaxes: of each, the largest magnitude since the last step; 0 before the first number.
        history: (3, steps) float32, those of the steps before, the last first; 0 where there was none.
    """

    casts: Casts
    scales: torch.Tensor
    has_scales: bool
    amaxes: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    history: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear, casts: Casts, history_len: int, device: torch.device) -> "DelayedLinear":
        """Takes the parameters of `linear`.

        Args:
            device: where it will compute.
        """
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        new.casts = casts
        new.scales = torch.ones(3, device=device)
        new.has_scales = False
        new.amaxes = tuple(torch.zeros((), device=device) for _ in range(3))  # type: ignore[assignment]
        new.history = torch.zeros(3, history_len, device=device)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Without gradients nothing is learned from x: a validation leaves no trace.
        recorded: Any = zip(self.amaxes, self.casts.delayed, strict=True)
        amaxes = [amax if delayed and torch.is_grad_enabled() else None for amax, delayed in recorded]
        scales = self.scales if self.has_scales else None
        out = DelayedMatmul.apply(x.flatten(0, -2), self.weight, scales, *amaxes, self.casts)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias
