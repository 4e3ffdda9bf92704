"""INT8 GEMMs in training: forward, input gradient and weight gradient.

Operands are rounded to int8 with one float32 scale per row of the left and per column of the right operand ("rowwise")
or per tensor ("tensorwise"), multiplied with int32 sums (`kernels/matmul_8bit.py`), and scaled back. Weights stay in
high precision. Based on SwitchBack (arXiv 2304.13013) and Jetfire (arXiv 2403.12422).

Shapes: M tokens, K inputs, N outputs of a layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchtitan.config.low_precision import Int8
from torchtitan.converters.converter import LayerGemms, ProfilerOp
from torchtitan.converters.filter import FilterRules, names_own_layers
from torchtitan.converters.grouped_8bit import Grouped8BitLinear, GroupedGemms, grouped_op
from torchtitan.converters.int8_fsdp import GatheredWeight, ShardedWeight, set_tensorwise_scales
from torchtitan.converters.linear import LinearConverter, Scaled, with_parameters_of
from torchtitan.converters.measured_filter import measured_reason
from torchtitan.converters.numerics import Role
from torchtitan.converters.target import Target
from torchtitan.device import HAS_TRITON
from torchtitan.errors import ConfigError
from torchtitan.kernels.grouped_8bit import round_gradient
from torchtitan.kernels.matmul_8bit import as_right, int8_matmul
from torchtitan.kernels.quantize import (
    LARGEST,
    ScaleRecipe,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_once,
    quantize_rows,
    quantize_with,
)
from torchtitan.kernels.quantized import Quantized, QuantizedInput
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear

# torch._int_mm needs int8 tensor cores, from Turing (7.5) on: NVIDIA's CUDA programming guide.
FIRST_CAPABILITY = (7, 5)
NO_EXPERTS = "tensorwise has no grouped GEMMs; int8.recipe_name = rowwise converts experts"
MULTIPLE_OF = 16  # on CUDA, torch._int_mm requires K and N to be multiples of 8; cuBLASLt is fast with 16

# Relative errors of output, input gradient and weight gradient against float32 on normally distributed data, measured
# with the layer of tests/unit/test_int8.py.
KNOWN_ERRORS = {"rowwise": (0.010, 0.010, 0.011), "tensorwise": (0.014, 0.014, 0.014)}


class Int8Gemms(NamedTuple):
    """Which of the three GEMMs are int8, and whether scales are rowwise or tensorwise."""

    recipe: ScaleRecipe
    output: bool
    grad_input: bool
    grad_weight: bool
    emulate: bool


def round_input(x: torch.Tensor, gemms: Int8Gemms, trains: bool) -> QuantizedInput:
    """Quantizes x for the GEMMs that are int8.

    Args:
        x: (M, K), or with several token dimensions.
        trains: a backward pass follows.
    """
    x, recipe, by_column = x.flatten(0, -2), gemms.recipe, gemms.grad_weight and trains
    if gemms.output and by_column:
        left, right = quantize_both(x, recipe)
        return QuantizedInput(left, as_right(right))
    return QuantizedInput(
        quantize(x, recipe) if gemms.output else None, as_right(quantize_columns(x, recipe)) if by_column else None
    )


class Int8Matmul(torch.autograd.Function):
    """x @ weight.T with the chosen GEMMs in int8. x: (M, K), weight: (N, K), out: (M, N).

    Saves x as the weight-gradient GEMM needs it. Unless the weight comes quantized for both GEMMs, it is quantized
    again in the backward pass, with scales from the forward pass: a saved int8 copy would take memory even after FSDP
    has freed the gathered weight.

    Args:
        low: x quantized by `round_input`.
    """

    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, low: QuantizedInput, gemms: Int8Gemms) -> torch.Tensor:
        ctx.gemms, ctx.dtype = gemms, x.dtype
        column_scale_inverse = None
        if low.left is None:
            out = x @ _high_precision(weight).T
        else:
            if isinstance(weight, GatheredWeight):
                rows = weight.by_rows()
            elif gemms.grad_input and ctx.needs_input_grad[0]:
                rows, column_scale_inverse = quantize_rows(weight, gemms.recipe)
            else:
                rows = quantize(weight, gemms.recipe)
            out = int8_matmul(low.left, rows.transpose(), x.dtype, gemms.emulate)
        ctx.save_for_backward(weight, column_scale_inverse, *(low.right or (x, None)))
        return out

    @staticmethod
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, column_scale_inverse, x, x_scale_inverse = ctx.saved_tensors
        recipe, _, grad_input, grad_weight, emulate = ctx.gemms
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        rows = columns = x_grad = weight_grad = None
        if grad_input and needs_x and grad_weight and needs_weight:
            if recipe == "rowwise":
                rows, columns = round_gradient(out_grad, weight.shape[1], torch.int8)
            else:
                rows, columns = quantize_both(out_grad, recipe)
        elif grad_input and needs_x:
            rows = quantize(out_grad, recipe)
        elif grad_weight and needs_weight:
            columns = quantize_columns(out_grad, recipe)
        if rows is not None:  # sums over N: one scale per column of the weight
            x_grad = int8_matmul(rows, _by_columns(weight, column_scale_inverse, recipe), ctx.dtype, emulate)
        elif needs_x:
            x_grad = out_grad @ _high_precision(weight)
        if columns is not None:  # sums over tokens: one scale per column of both
            weight_grad = int8_matmul(columns.transpose(), Quantized(x, x_scale_inverse), weight.dtype, emulate)
        elif needs_weight:
            weight_grad = out_grad.T @ x
        return x_grad, weight_grad, None, None


def _by_columns(weight: torch.Tensor, scale_inverse: torch.Tensor | None, recipe: ScaleRecipe) -> Quantized:
    """The weight as the right operand of the input-gradient GEMM."""
    known = weight.by_columns() if isinstance(weight, GatheredWeight) else None
    if known is not None:
        return known
    if scale_inverse is not None:
        return Quantized(quantize_with(weight, scale_inverse), scale_inverse)
    return quantize_columns(_high_precision(weight), recipe)


def _high_precision(weight: torch.Tensor) -> torch.Tensor:
    return weight.dequantize_all() if isinstance(weight, GatheredWeight) else weight


class Int8Linear(nn.Linear):
    """A linear layer with int8 GEMMs. Its weight is a plain parameter, in whatever precision it is passed."""

    gemms: Int8Gemms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = (self.gemms, torch.is_grad_enabled())
        low = quantize_once(x, key, lambda x: round_input(x, *key))
        out: torch.Tensor = Int8Matmul.apply(x.flatten(0, -2), self.weight, low, self.gemms)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


class Int8Converter(LinearConverter):
    """Replaces linear layers with `Int8Linear`.

    Raises:
        ConfigError: the device has no int8 GEMMs and `emulate` is not set, or all GEMMs are turned off.
    """

    name = "int8"

    def __init__(self, config: Int8, target: Target) -> None:
        super().__init__(config.filter_fqns, target, explicit=names_own_layers(config))
        capability = target.compute_capability
        if capability is not None and capability < FIRST_CAPABILITY and not config.emulate:
            raise ConfigError(
                f"model.converters: int8 needs a GPU of compute capability 7.5 or above, but this one has "
                f"{capability[0]}.{capability[1]}; remove int8, or set int8.emulate (same numerics, no speedup)."
            )
        if not (config.output or config.grad_input or config.grad_weight):
            raise ConfigError(
                "int8: output, grad_input and grad_weight are all false; set one to true, or remove int8."
            )
        self.recipe = config.recipe_name
        self.settings = Int8Gemms(
            config.recipe_name, config.output, config.grad_input, config.grad_weight, config.emulate
        )
        self.all_gather = config.enable_fsdp_int8_all_gather
        known = KNOWN_ERRORS[config.recipe_name]
        self.gemms = LayerGemms(
            ProfilerOp("aten::mm", ("double",))
            if config.emulate
            else ProfilerOp("torchtitan::int8_mm" if target.on_cpu or HAS_TRITON else "aten::_int_mm"),
            *(error if on else None for error, on in zip(known, self.settings[1:4], strict=True)),
        )
        no_experts = NO_EXPERTS if self.recipe == "tensorwise" else ""
        self.rules = FilterRules(MULTIPLE_OF, None, lambda *sizes: measured_reason(self, *sizes), no_experts)
        if not no_experts:
            self.grouped_gemms = dataclasses.replace(self.gemms, op=grouped_op("signed char"))
            if not (target.on_cpu or config.emulate or HAS_TRITON):
                self.cannot_group = (
                    "int8 computes experts on a GPU with Triton, which is not installed; install it, or add "
                    "moe.experts to int8.filter_fqns."
                )

    @property
    def description(self) -> str:
        return f"int8 {self.settings}"

    def convert(self, model: nn.Module) -> None:
        super().convert(model)
        if self.all_gather and any(decision.converted and decision.experts for decision in self.decisions):
            logger.info(
                "int8.enable_fsdp_int8_all_gather: the weights of experts are all-gathered in high precision, since "
                "FSDP's int8 all-gather is for matrices"
            )
        converts_gradients = self.settings.grad_input or self.settings.grad_weight
        if converts_gradients and any(decision.converted and decision.fqn == "output" for decision in self.decisions):
            logger.warning(
                "int8 converts the output layer: nearly all of its gradient is rounded to 0, and the loss suffers "
                "(docs/low_precision.md); add output to int8.filter_fqns"
            )

    def swap(self, linear: nn.Linear) -> nn.Linear:
        new = with_parameters_of(linear, Int8Linear)
        new.gemms = self.settings
        return new

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        _, *gemms = self.settings
        return Grouped8BitLinear.of(layer, GroupedGemms(torch.int8, *gemms))

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        data, scale_inverse = quantize(tensor, self.settings.recipe)
        return Scaled(tensor / scale_inverse, data.float(), LARGEST)

    def swap_in_model(self, linear: nn.Linear, fqn: str) -> nn.Linear:
        new = self.swap(linear)
        if self.all_gather and self.shards_evenly(linear, fqn):
            new.weight = nn.Parameter(ShardedWeight(new.weight.data, self.settings.recipe))
        return new

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """Computes the scales of weights that are gathered tensorwise, in one reduction."""
        if self.all_gather and self.recipe == "tensorwise":
            set_tensorwise_scales(models)
