"""Float8 linear layers with delayed scaling: scales are known before the tensors are.

A dynamic scale needs the largest magnitude (amax) of a tensor before its first number can be rounded. A delayed scale
comes from the amaxes of previous steps (NVIDIA's Transformer Engine), so rounding and measuring this step's amax take
one pass over the data. `amax_history.py` computes scales from amaxes after each step.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchtitan.converters.linear import with_parameters_of
from torchtitan.kernels import rounding
from torchtitan.kernels.matmul_8bit import float8_matmul
from torchtitan.kernels.quantize import float8_scale, round_to_float8
from torchtitan.kernels.quantized import Quantized

INPUT, WEIGHT, OUT_GRAD = range(3)


class Casts(NamedTuple):
    """How the three operands of a layer's GEMMs (input, weight, output gradient) are rounded.

    delayed: with a delayed scale, else with a dynamic one.
    """

    delayed: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    emulate: bool


class DelayedMatmul(torch.autograd.Function):
    """x @ weight.T in float8. x: (M, K), weight: (N, K), out: (M, N).

    Saves x in float8 with its scale inverse, and copies of the scales at the start of the forward pass, so that the
    backward pass uses the same ones even if the layer's change. The weight is quantized again: a saved float8 copy
    would take memory even after FSDP has freed the gathered weight.

    Args:
        scales: (3,) float32, of input, weight and output gradient; None before there are any: all are dynamic then.
        amaxes: three scalars for the same tensors, updated to the maximum seen. None records nothing.
    """

    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        amax_input: torch.Tensor | None,
        amax_weight: torch.Tensor | None,
        amax_out_grad: torch.Tensor | None,
        casts: Casts,
    ) -> torch.Tensor:
        # Copies, since the layer's own scales are overwritten after each step.
        known = [scales[i].clone() if scales is not None and casts.delayed[i] else None for i in range(3)]
        x_scale = _scale(x, known[INPUT], amax_input, casts.dtypes[INPUT])
        weight_scale = _scale(weight, known[WEIGHT], amax_weight, casts.dtypes[WEIGHT])
        x_low = round_to_float8(x, x_scale, casts.dtypes[INPUT])
        weight_low = round_to_float8(weight, weight_scale, casts.dtypes[WEIGHT])
        ctx.save_for_backward(*x_low, weight, weight_scale, known[OUT_GRAD])
        ctx.amax_out_grad = amax_out_grad  # written in backward; not via save_for_backward, since it may have changed
        ctx.casts = casts
        ctx.dtype = x.dtype
        return float8_matmul(x_low, weight_low.transpose(), x.dtype, casts.emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
    """The known scale for x, or else a dynamic one. Records the amax of x."""
    if known is not None and record is None:
        return known
    amax = rounding.amax(x).amax()
    if record is not None:
        record.copy_(torch.maximum(record, amax))
    return float8_scale(amax, dtype) if known is None else known


class DelayedLinear(nn.Linear):
    """A linear layer in float8. Its weight is a plain parameter, in whatever precision it is passed.

    Its scaling state belongs to the run, not the model. It is not in buffers, so state dicts do not include it and
    allocating the model's memory does not clear it.

    Attributes:
        scales: (3,) float32, of input, weight and output gradient.
        has_scales: whether the scales are known; until then all are dynamic. Changes only once, since compiled code
            depends on it.
        amaxes: largest magnitude of each tensor since the last step; 0 initially.
        history: (3, steps) float32, amaxes of previous steps, most recent first; 0 for none.
    """

    casts: Casts
    scales: torch.Tensor
    has_scales: bool
    amaxes: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    history: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear, casts: Casts, history_len: int, device: torch.device) -> "DelayedLinear":
        """A layer with the parameters of `linear`.

        Args:
            device: where it will run.
        """
        new = with_parameters_of(linear, cls)
        new.casts = casts
        new.scales = torch.ones(3, device=device)
        new.has_scales = False
        new.amaxes = tuple(torch.zeros((), device=device) for _ in range(3))  # type: ignore[assignment]
        new.history = torch.zeros(3, history_len, device=device)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Without gradients no amax is recorded: validation does not affect training.
        recorded = zip(self.amaxes, self.casts.delayed, strict=True)
        amaxes = [amax if delayed and torch.is_grad_enabled() else None for amax, delayed in recorded]
        scales = self.scales if self.has_scales else None
        out: torch.Tensor = DelayedMatmul.apply(x.flatten(0, -2), self.weight, scales, *amaxes, self.casts)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias
