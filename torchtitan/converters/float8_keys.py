"""Keys of [float8] that contradict each other or have no effect."""

import math

from torchtitan.config.low_precision import Cast, Float8
from torchtitan.config.training import Optimizer
from torchtitan.converters.weight_bounds import largest_ratio

CAST_KEYS = ("cast_input", "cast_weight", "cast_grad_output")
DELAYED_KEYS = ("delayed_history_len", "delayed_amax", "delayed_margin", "delayed_format")


def casts(config: Float8) -> tuple[Cast, Cast, Cast]:
    """Whether input, weight and output gradient have delayed or dynamic scales."""
    usual: Cast = "delayed" if config.recipe_name == "delayed" else "dynamic"
    return config.cast_input or usual, config.cast_weight or usual, config.cast_grad_output or usual


def find_problems(config: Float8, optimizer: Optimizer) -> list[str]:
    """One sentence per problem."""
    delayed = _delayed_problems if config.recipe_name == "delayed" else _keys_of_delayed
    return [*_all_gather_problems(config), *delayed(config), *_weight_bound_problems(config, optimizer)]


def _all_gather_problems(config: Float8) -> list[str]:
    problems, recipe = [], config.recipe_name or "tensorwise"
    if config.enable_fsdp_float8_all_gather and recipe == "delayed":
        problems.append(
            "float8.enable_fsdp_float8_all_gather does not support delayed scales: unset it, or use "
            "float8.recipe_name = tensorwise, where float8.weight_scale = bound needs no collective either."
        )
    elif config.enable_fsdp_float8_all_gather and recipe != "tensorwise":
        problems.append(
            f"float8.enable_fsdp_float8_all_gather needs float8.recipe_name = tensorwise, not {recipe}, "
            "whose scales cannot be computed from a shard. Unset one of them."
        )
    if config.precompute_float8_dynamic_scale_for_fsdp and not config.enable_fsdp_float8_all_gather:
        problems.append(
            "float8.precompute_float8_dynamic_scale_for_fsdp computes the scales of the float8 all-gather: set "
            "float8.enable_fsdp_float8_all_gather too, or unset it."
        )
    return problems


def _delayed_problems(config: Float8) -> list[str]:
    if "delayed" in casts(config):
        return []
    return [
        "float8.recipe_name = delayed, with cast_input, cast_weight and cast_grad_output all dynamic, has no delayed "
        "scales; use tensorwise."
    ]


def _keys_of_delayed(config: Float8) -> list[str]:
    default = type(config)()
    given = [key for key in DELAYED_KEYS if getattr(config, key) != getattr(default, key)]
    given += [key for key in CAST_KEYS if getattr(config, key) == "delayed"]
    return [
        f"float8.{key} applies only to delayed scaling: set float8.recipe_name = delayed, or unset it." for key in given
    ]


def _weight_bound_problems(config: Float8, optimizer: Optimizer) -> list[str]:
    if config.weight_scale != "bound":
        if config.weight_scale_freq == type(config)().weight_scale_freq:
            return []
        return ["float8.weight_scale_freq applies only to float8.weight_scale = bound; set that too, or unset it."]
    problems = []
    if not config.enable_fsdp_float8_all_gather:
        problems.append(
            "float8.weight_scale = bound computes the scales of the float8 all-gather: set "
            "float8.enable_fsdp_float8_all_gather too, or unset it."
        )
    if config.precompute_float8_dynamic_scale_for_fsdp:
        problems.append(
            "float8.precompute_float8_dynamic_scale_for_fsdp measures the weights after each step, which "
            "float8.weight_scale = bound avoids; unset one of them."
        )
    if optimizer.name not in ("Adam", "AdamW"):
        problems.append(
            f"float8.weight_scale = bound supports only AdamW and Adam, whose updates are bounded, not "
            f"{optimizer.name}; use measured."
        )
    elif math.isinf(largest_ratio(optimizer.beta1, optimizer.beta2)):
        problems.append(
            f"float8.weight_scale = bound: with optimizer.beta1 = {optimizer.beta1} and optimizer.beta2 = "
            f"{optimizer.beta2} updates have no bound; a bound needs beta1^2 < beta2 < 1. Use measured."
        )
    return problems
