"""Matrix products in float8, with scales computed anew each time, by torchao."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from torch import nn

from torchtitan.config.precision import Float8
from torchtitan.converters.filter import decide
from torchtitan.converters.target import Target
from torchtitan.errors import ConfigError
from torchtitan.logging import logger

# float8 tensor cores begin with Ada (8.9) and Hopper (9.0): NVIDIA's CUDA programming guide, table of capabilities.
FIRST_CAPABILITY = (8, 9)
MULTIPLE_OF = 16  # torch._scaled_mm on CUDA; the CPU kernel takes any shape, but a model must not depend on that


class Float8Converter:
    """Swaps linear layers for torchao's `Float8Linear`, whose weight stays in high precision.

    Forward, input gradient and weight gradient each are a `torch._scaled_mm`; rowwise_with_gw_hp leaves the weight
    gradient in high precision. On a CPU the product is real too.

    Raises:
        ConfigError: a key is not built yet, or the device has no float8 and `emulate` is not set.
    """

    def __init__(self, config: Float8, target: Target) -> None:
        for key in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"):
            if getattr(config, key):
                raise ConfigError(f"float8.{key} is not built yet; weights are gathered in high precision. Unset it.")
        if config.force_recompute_fp8_weight_in_bwd:
            logger.warning("float8.force_recompute_fp8_weight_in_bwd has no effect any more in torchao; remove the key")
        capability = target.compute_capability
        if capability is not None and capability < FIRST_CAPABILITY and not config.emulate:
            raise ConfigError(
                f"model.converters: float8 needs a GPU of compute capability 8.9 or above, and this one has "
                f"{capability[0]}.{capability[1]}; remove float8, or set float8.emulate for its numerics without speed."
            )
        self.config = config
        self.recipe = config.recipe_name or "tensorwise"

    def convert(self, model: nn.Module) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # a second of import

        decisions = decide(model, self.config.filter_fqns, "float8.filter_fqns", self.recipe, MULTIPLE_OF)
        chosen = {decision.fqn for decision in decisions if decision.converted}
        if not chosen:
            reasons = Counter(decision.reason for decision in decisions)
            rules = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
            raise ConfigError(
                f"model.converters: float8 would convert none of {len(decisions)} linear layers: {rules}."
            )
        config = Float8LinearConfig.from_recipe_name(self.recipe)
        if self.config.emulate:
            config = dataclasses.replace(config, emulate=True)
        convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn in chosen, config=config)
        logger.info(f"float8 ({self.recipe}): converted {len(chosen)} of {len(decisions)} linear layers")

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """Nothing: scales are computed from the weights in each forward pass."""
