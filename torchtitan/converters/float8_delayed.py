"""Linear layers in float8 whose scales are known before their numbers are: delayed scaling.

A dynamic scale needs the largest magnitude (amax) of a tensor before its first number can be rounded. A delayed one
comes from the amaxes of the steps before (NVIDIA's Transformer Engine), so rounding and looking for this step's amax
are one pass over the data. `amax_history.py` makes scales of amaxes after each step.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.kernels import rounding
from torchtitan.kernels.matmul_8bit import float8_matmul
from torchtitan.kernels.quantize import float8_scale, round_to_float8
from torchtitan.kernels.quantized import Quantized

INPUT, WEIGHT, OUT_GRAD = range(3)


class Casts(NamedTuple):
    """How the three operands of a layer's GEMMs (input, weight, gradient of the output) are rounded.

    delayed: by a delayed scale, else by a dynamic one.
    """

    delayed: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    emulate: bool


class DelayedMatmul(torch.autograd.Function):
    """x @ weight.T in float8. x: (M, K), weight: (N, K), out: (M, N).

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
        x_low = round_to_float8(x, x_scale, casts.dtypes[INPUT])
        weight_low = round_to_float8(weight, weight_scale, casts.dtypes[WEIGHT])
        ctx.save_for_backward(*x_low, weight, weight_scale, known[OUT_GRAD])
        ctx.amax_out_grad = amax_out_grad  # to write to, so it may have changed
        ctx.casts = casts
        ctx.dtype = x.dtype
        return float8_matmul(x_low, weight_low.transpose(), x.dtype, casts.emulate, fast=True)

    @staticmethod
    def backward(ctx, out_grad):  # type: ignore[no-untyped-def, override]
        x_data, x_scale_inverse, weight, weight_scale, scale = ctx.saved_tensors
        casts = ctx.casts
        scale = _scale(out_grad, scale, ctx.amax_out_grad, casts.dtypes[OUT_GRAD])
        out_low = round_to_float8(out_grad, scale, casts.dtypes[OUT_GRAD])
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            weight_low = round_to_float8(weight, weight_scale, casts.dtypes[WEIGHT])
            x_grad = float8_matmul(out_low, weight_low, ctx.dtype, casts.emulate)
        if ctx.needs_input_grad[1]:
            weight_grad = float8_matmul(
                out_low.transpose(), Quantized(x_data, x_scale_inverse), weight.dtype, casts.emulate
            )
        return x_grad, weight_grad, None, None, None, None, None


def _scale(
    x: torch.Tensor, known: torch.Tensor | None, record: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The scale for x: the known one, or else its own. Its amax is recorded."""
    if known is not None and record is None:
        return known
    amax = rounding.amax(x).amax()
    if record is not None:
        record.copy_(torch.maximum(record, amax))
    return float8_scale(amax, dtype) if known is None else known


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
