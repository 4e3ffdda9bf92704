"""Upper bounds of the largest magnitudes of weights, known on every rank without communication.

An AdamW update moves a weight no further than the learning rate allows, whatever the gradients. So a measured amax
bounds the amax after the next update, and after later ones. Derivation: docs/low_precision.md.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.config.training import Optimizer
from torchtitan.converters.amax import all_reduce_max, local_amaxes
from torchtitan.errors import TrainingError
from torchtitan.logging import logger

if TYPE_CHECKING:
    from torchtitan.compat.torchao import WeightWithDynamicFloat8CastTensor

# A float32 operation has a relative error of at most 2^-24. An update applies four to a weight, hence an error relative
# to the weight, and many to the moments, which amplify it by at most 1 / (1 - beta), hence one relative to the step.
WEIGHT_ROUNDING = 2**-21
STEP_ROUNDING = 2**-10

Bound = TypeVar("Bound", float, torch.Tensor)


def largest_ratio(beta1: float, beta2: float) -> float:
    """The largest |m| / sqrt(v), bias-corrected, that Adam's moments can reach with any gradients (eps = 0).

    (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), by Cauchy-Schwarz; infinite if beta1^2 >= beta2.
    (Adam's paper, arXiv 1412.6980, section 2.1, gives 1 for usual betas, which holds for most gradients, not for all.)
    """
    if not beta1**2 < beta2 < 1:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def bound_after_update(bound: Bound, learning_rate: float, ratio: float, decay: float) -> Bound:
    """The bound on magnitudes after an update.

    Args:
        bound: the bound before it, a number or a float64 tensor.
        ratio: `largest_ratio`.
        decay: decoupled weight decay.
    """
    step = learning_rate * ratio * (1 + STEP_ROUNDING)
    return (bound * abs(1 - learning_rate * decay) + step) * (1 + WEIGHT_ROUNDING)


class WeightBounds:
    """Scales from bounds, for the weights that FSDP gathers in float8 (torchao's, tensorwise).

    Args:
        optimizer: Adam or AdamW.
        every: steps between measurements, each of which takes an all-reduce.
    """

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self.betas = [optimizer.beta1, optimizer.beta2]
        self.ratio = largest_ratio(optimizer.beta1, optimizer.beta2)
        # Adam adds weight decay to the gradient, and the ratio holds for any gradient.
        self.decay = optimizer.weight_decay if optimizer.name == "AdamW" else 0.0
        self.every = every
        self.layers: list[str] = []
        self.bounds: torch.Tensor | None = None
        self.age = 0

    @torch.no_grad()
    def after_step(
        self,
        models: Sequence[nn.Module],
        learning_rate: float | None,
        group: dist.ProcessGroup | None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Updates the bounds after an optimizer step. Every `every` steps, measures instead; collective then. (If the
        device skips a step, the bound grows all the same; it is still a bound.)

        Raises:
            TrainingError: a weight has exceeded its bound.
        """
        weights = float8_all_gather_weights(models)
        if not weights or learning_rate is None:
            return
        if self.bounds is not None:
            self.bounds = bound_after_update(self.bounds, learning_rate, self.ratio, self.decay)
        self.age += 1
        if self.bounds is None or self.age >= self.every:
            measured = measure_amaxes(weights, group).double()
            # This waits for the device, too expensive for every step.
            if self.bounds is not None and self.every > 1 and not bool((measured <= self.bounds).all()):
                raise TrainingError(
                    "float8.weight_scale = bound: a weight exceeds its bound, so something other than the optimizer "
                    "changed it. Set float8.weight_scale = measured."
                )
            self.bounds, self.age = measured, 0
        self.layers = list(weights)
        set_scales(weights, self.bounds)

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """By layer path: its bound, steps since it was measured, and the betas of the moments."""
        if self.bounds is None:
            return {}
        bounds = zip(self.layers, self.bounds.tolist(), strict=True)
        return {layer: [bound, self.age, *self.betas] for layer, bound in bounds}

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any], gradient_ratio: float = 1.0) -> None:
        """Restores the bounds, which no gradient enters. If any is missing, the first step measures each weight as it
        is gathered."""
        weights = float8_all_gather_weights(models)
        if not weights:
            return
        # A checkpoint of another recipe may have lists of numbers for a layer, which are no bound.
        state = {fqn: saved for fqn, saved in state.items() if not any(isinstance(value, list) for value in saved)}
        if not weights.keys() <= state.keys():
            logger.info("float8.weight_scale = bound: the checkpoint lacks some bounds; the first step measures")
            return
        bounds, ages, *betas = zip(*(state[fqn] for fqn in weights), strict=True)
        if betas and any(list(saved) != self.betas for saved in zip(*betas, strict=True)):
            logger.warning(
                "float8.weight_scale = bound: the optimizer's betas have changed, but its moments come from the "
                "previous ones, so there is no bound; weights are measured after each step"
            )
            self.betas, self.every = [0.0, 0.0], 1  # matches no optimizer, so this persists across later resumes
        device = next(iter(weights.values())).device
        self.bounds, self.age = torch.tensor(bounds, dtype=torch.float64, device=device), max(ages)
        self.layers = list(weights)
        set_scales(weights, self.bounds)


def float8_all_gather_weights(models: Sequence[nn.Module]) -> dict[str, "WeightWithDynamicFloat8CastTensor"]:
    """This rank's shards of the weights that are gathered in float8, by layer path."""
    return {
        fqn: module.weight._local_tensor
        for model in models
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and isinstance(module.weight, DTensor)
        and hasattr(module.weight._local_tensor, "_precomputed_scale")
    }


def measure_amaxes(
    weights: "dict[str, WeightWithDynamicFloat8CastTensor]", group: dist.ProcessGroup | None
) -> torch.Tensor:
    """(number of weights,): the amax of each full weight, in one all-reduce over the ranks that hold shards."""
    return all_reduce_max(local_amaxes([weight._tensor for weight in weights.values()]), group)


def set_scales(weights: "dict[str, WeightWithDynamicFloat8CastTensor]", amaxes: torch.Tensor) -> None:
    """Sets the scales with which the weights are gathered from now on."""
    from torchtitan.compat.torchao import amax_to_scale

    for weight, scale in zip(weights.values(), amax_to_scale(amaxes, torch.float8_e4m3fn), strict=True):
        weight._precomputed_scale = scale
