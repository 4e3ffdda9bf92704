"""Matrix products in float8, with scales computed anew each time, by torchao."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.config.precision import Float8
from torchtitan.converters.filter import FilterRules, too_small_for_rowwise, too_small_for_tensorwise
from torchtitan.converters.linear import EMULATED_FLOAT8, LinearConverter, Products, Role, Scaled, Trace
from torchtitan.converters.measure import measured_reason
from torchtitan.converters.target import Target
from torchtitan.errors import ConfigError
from torchtitan.logging import logger

# float8 tensor cores begin with Ada (8.9): NVIDIA's CUDA programming guide, table of capabilities.
FIRST_CAPABILITY = (8, 9)
MULTIPLE_OF = 16  # torch._scaled_mm on CUDA; the CPU kernel takes any shape, but a model must not depend on that

# Relative errors of output, input gradient and weight gradient on normal data: tests/unit/test_float8.py
KNOWN_ERRORS = {
    "tensorwise": (0.037, 0.059, 0.059),
    "rowwise": (0.036, 0.036, 0.038),
    "rowwise_with_gw_hp": (0.036, 0.036, None),
}


class Float8Converter(LinearConverter):
    """Swaps linear layers for torchao's `Float8Linear`, whose weight stays in high precision.

    Forward, input gradient and weight gradient each are a `torch._scaled_mm`; rowwise_with_gw_hp leaves the weight
    gradient in high precision. On a CPU the product is real too.

    Raises:
        ConfigError: the device has no float8 and `emulate` is not set, or keys contradict each other.
    """

    name = "float8"

    def __init__(self, config: Float8, target: Target) -> None:
        super().__init__(config.filter_fqns, target, given=config.filter_fqns != type(config)().filter_fqns)
        self.recipe = config.recipe_name or "tensorwise"
        self.gather = config.enable_fsdp_float8_all_gather
        self.precompute = config.precompute_float8_dynamic_scale_for_fsdp
        self.emulate = config.emulate
        if self.gather and self.recipe != "tensorwise":
            raise ConfigError(
                f"float8.enable_fsdp_float8_all_gather needs float8.recipe_name = tensorwise, not {self.recipe}: "
                "a shard does not hold what the other scales need. Unset one of them."
            )
        if self.precompute and not self.gather:
            raise ConfigError(
                "float8.precompute_float8_dynamic_scale_for_fsdp computes the scales of the float8 all-gather: set "
                "float8.enable_fsdp_float8_all_gather too, or unset it."
            )
        if config.force_recompute_fp8_weight_in_bwd:
            logger.warning("float8.force_recompute_fp8_weight_in_bwd has no effect any more in torchao; remove the key")
        capability = target.compute_capability
        if capability is not None and capability < FIRST_CAPABILITY and not config.emulate:
            raise ConfigError(
                f"model.converters: float8 needs a GPU of compute capability 8.9 or above, and this one has "
                f"{capability[0]}.{capability[1]}; remove float8, or set float8.emulate for its numerics without speed."
            )
        self.products = Products(
            EMULATED_FLOAT8 if config.emulate else Trace("aten::_scaled_mm"), *KNOWN_ERRORS[self.recipe]
        )
        too_small = too_small_for_tensorwise if self.recipe == "tensorwise" else too_small_for_rowwise
        self.rules = FilterRules(MULTIPLE_OF, too_small, lambda m, k, n: measured_reason(self, m, k, n))

    @property
    def description(self) -> str:
        return f"float8 {self.recipe}{' emulated' if self.emulate else ''}"

    def swap(self, linear: nn.Linear, gather: bool = False) -> nn.Linear:
        from torchao.float8 import Float8LinearConfig  # a second of import
        from torchao.float8.float8_linear import Float8Linear

        config: Any = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=self.emulate,
            enable_fsdp_float8_all_gather=gather,
        )
        return Float8Linear.from_float(linear, config=config)

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        # torchao's recipes: gradients in e5m2 where a tensor has one scale, everything else in e4m3.
        e5m2 = role == "out_grad" and self.recipe == "tensorwise"
        dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
        amax = tensor.abs().amax() if self.recipe == "tensorwise" else tensor.abs().amax(1, keepdim=True)
        largest = torch.finfo(dtype).max
        exact = tensor * (largest / amax.clamp_min(1e-12))
        return Scaled(exact, exact.clamp(-largest, largest).to(dtype).float(), largest)

    def swap_in_model(self, linear: nn.Linear, fqn: str) -> nn.Linear:
        return self.swap(linear, self.gather and self.gathered_evenly(linear, fqn))

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """With precomputed scales: those of all weights, in one reduction."""
        if self.precompute:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            for model in models:
                precompute_float8_dynamic_scale_for_fsdp(model)
