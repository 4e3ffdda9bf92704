"""Float8 linear layers with dynamic scaling: scales are computed from the tensors that are rounded.

Shapes: M tokens, K inputs, N outputs of a layer.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchtitan.converters.linear import with_parameters_of
from torchtitan.kernels import rounding
from torchtitan.kernels.grouped_8bit import round_gradient
from torchtitan.kernels.matmul_8bit import as_right, float8_matmul
from torchtitan.kernels.quantize import (
    float8_scale,
    powers_of_two,
    quantize_once,
    quantize_weight,
    round_rows,
    round_to_float8,
)
from torchtitan.kernels.quantized import Quantized, QuantizedInput

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Float8Recipe(NamedTuple):
    """How a layer's three GEMMs are computed, following torchao's recipes of the same names.

    rowwise: one scale per row of the left and per column of the right operand, rounded down to a power of two, with
        gradients in e4m3; else one scale per tensor, with gradients in e5m2.
    hp_weight_grad: the weight gradient stays in high precision.
    """

    rowwise: bool
    hp_weight_grad: bool
    emulate: bool


RECIPES = {"tensorwise": (False, False), "rowwise": (True, False), "rowwise_with_gw_hp": (True, True)}


def round_input(x: torch.Tensor, recipe: Float8Recipe, trains: bool) -> QuantizedInput:
    """Quantizes x for the GEMMs that use it.

    Args:
        trains: a backward pass follows.
    """
    if not recipe.rowwise:
        low = _tensorwise(x, E4M3)
        return QuantizedInput(low, as_right(low) if trains else low)
    if trains and not recipe.hp_weight_grad:
        by_row, by_column = _rowwise_both(x.flatten(0, -2))
        return QuantizedInput(by_row, as_right(by_column))
    return QuantizedInput(_rowwise(x.flatten(0, -2)), None)


# Otherwise the compiler would trace into tensor subclasses (from FSDP's or tensor parallelism's float8 all-gather).
@torch.compiler.allow_in_graph
class Float8Matmul(torch.autograd.Function):
    """x @ weight.T in float8. x: (..., K), weight: (N, K), out: (..., N).

    Saves x as the weight-gradient GEMM needs it, in float8 unless that GEMM stays in high precision. The weight is
    quantized again in the backward pass, rowwise with scales from the forward pass: a saved float8 copy would take
    memory even after FSDP has freed the gathered weight.

    Args:
        low: x quantized by `round_input`.
    """

    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, low: QuantizedInput, recipe: Float8Recipe
    ) -> torch.Tensor:
        ctx.recipe, ctx.shape, ctx.dtype = recipe, x.shape, x.dtype
        column_scale_inverse = None
        if recipe.rowwise and not recipe.hp_weight_grad and ctx.needs_input_grad[0]:
            right, column_scale_inverse = quantize_weight(weight, "rows and columns", lambda w: round_rows(w, E4M3))
        else:
            right = _weight(weight, "rows" if recipe.rowwise else "tensor")
        ctx.save_for_backward(weight, column_scale_inverse, *(low.right or (x.flatten(0, -2), None)))
        assert low.left is not None
        out: torch.Tensor = float8_matmul(low.left, right.transpose(), x.dtype, recipe.emulate, fast=True)
        out = out.unflatten(0, x.shape[:-1])
        return out

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, column_scale_inverse, x, x_scale_inverse = ctx.saved_tensors
        rowwise, hp_weight_grad, emulate = ctx.recipe
        out_grad = out_grad.flatten(0, -2).contiguous()
        columns: Quantized | None = None
        if not rowwise:
            rows = columns = _tensorwise(out_grad, E5M2)
        elif hp_weight_grad:
            rows = _rowwise(out_grad)
        else:
            rows, columns = round_gradient(out_grad, weight.shape[1], E4M3)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            if not rowwise:
                right = _weight(weight, "tensor", by_columns=True)
            elif hp_weight_grad:
                right = _weight(weight, "power of two", by_columns=True)
            else:
                right = quantize_weight(weight, "columns", lambda weight: _by_columns(weight, column_scale_inverse))
            x_grad = float8_matmul(rows, right, ctx.dtype, emulate).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if columns is None:
                weight_grad = out_grad.T @ x
            else:
                weight_grad = float8_matmul(columns.transpose(), Quantized(x, x_scale_inverse), weight.dtype, emulate)
        return x_grad, weight_grad, None, None


def _weight(weight: Any, scales: str, by_columns: bool = False) -> Quantized:
    """A weight as the right operand of a GEMM.

    Args:
        by_columns: lay out the data for the GEMM that sums over rows, on a GPU.
    """

    def make(weight: torch.Tensor) -> Quantized:
        match scales:
            case "rows":
                low = _rowwise(weight)
            case _:
                low = _tensorwise(weight, E4M3, power_of_two=scales == "power of two")
        return as_right(low) if by_columns else low

    if hasattr(weight, "_scale"):  # gathered in float8
        return make(weight)
    if by_columns and scales == "tensor":  # the data of the output GEMM in another layout
        return quantize_weight(weight, (scales, by_columns), lambda weight: as_right(_weight(weight, scales)))
    return quantize_weight(weight, (scales, by_columns), make)


def _tensorwise(x: Any, dtype: torch.dtype, power_of_two: bool = False) -> Quantized:
    """(rows, columns) with one scale; x is in high precision or was already gathered in float8."""
    if hasattr(x, "_scale"):  # torchao's Float8TrainingTensor
        return Quantized(x._data.flatten(0, -2), x._scale.reciprocal())
    x = x.flatten(0, -2)
    scale = float8_scale(rounding.amax(x).amax(), dtype)
    return round_to_float8(x, powers_of_two(scale) if power_of_two else scale, dtype)


def _rowwise(x: torch.Tensor) -> Quantized:
    return round_to_float8(x, powers_of_two(float8_scale(rounding.amax(x), E4M3)), E4M3)


def _by_columns(weight: torch.Tensor, scale_inverse: torch.Tensor) -> Quantized:
    """A weight as the right operand of a GEMM that sums over rows, with known scales of columns."""
    return as_right(round_to_float8(weight, scale_inverse.reciprocal(), E4M3))


def _rowwise_both(x: torch.Tensor) -> tuple[Quantized, Quantized]:
    """Quantized with one scale per row, and with one per column."""
    rows, columns = (powers_of_two(float8_scale(amax, E4M3)) for amax in rounding.amax_both(x))
    by_row, by_column = rounding.round_to_both(x, rows, columns, E4M3)
    return Quantized(by_row, rows.reciprocal()), Quantized(by_column, columns.reciprocal())


class Float8Linear(nn.Linear):
    """A linear layer in float8. Its weight is a plain parameter, or one that is gathered in float8."""

    recipe: Float8Recipe

    @property
    def all_gather_dtype(self) -> torch.dtype | None:
        """The dtype in which tensor parallelism may all-gather inputs (`parallel.float8_tensor_parallel`): a tensorwise
        scale holds for all shards. None for high precision."""
        return None if self.recipe.rowwise else E4M3

    @classmethod
    def of(cls, linear: nn.Linear, recipe: Float8Recipe) -> "Float8Linear":
        """A layer with the parameters of `linear`."""
        new = with_parameters_of(linear, cls)
        new.recipe = recipe
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = (self.recipe, torch.is_grad_enabled())
        low = quantize_once(x, key, lambda x: round_input(x, *key))
        out = Float8Matmul.apply(x, self.weight, low, self.recipe)
        return out if self.bias is None else out + self.bias
