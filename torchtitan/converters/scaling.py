"""Scales that are computed after each step, for the next one: delayed scaling, and of weights that FSDP gathers in low
precision. All ranks with the same layers compute the same.

Bounds of weights: an AdamW update moves a weight no further than the learning rate allows, whatever the gradients. So a
measured amax bounds the amax after the next update, and after later ones, without communication.
Derivation: docs/low_precision.md.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan.compat import torchao
from torchtitan.config.training import Optimizer
from torchtitan.converters.converter import ModelConverter
from torchtitan.converters.gather import set_tensorwise_scales
from torchtitan.converters.linear import GRAD_OUTPUT, AmaxHistory, LowPrecisionLinear
from torchtitan.errors import TrainingError
from torchtitan.logging import logger

# A float32 operation has a relative error of at most 2^-24. An update applies four to a weight, hence an error relative
# to the weight, and many to the moments, which amplify it by at most 1 / (1 - beta), hence one relative to the step.
WEIGHT_ROUNDING = 2**-21
STEP_ROUNDING = 2**-10

Bound = TypeVar("Bound", float, torch.Tensor)


def largest_adam_ratio(beta1: float, beta2: float) -> float:
    """The largest |m| / sqrt(v), bias-corrected, that Adam's moments can reach with any gradients (eps = 0).

    (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), by Cauchy-Schwarz; infinite if beta1^2 >= beta2.
    (Adam's paper, arXiv 1412.6980, section 2.1, gives 1 for usual betas, which holds for most gradients, not for all.)
    """
    if not beta1**2 < beta2 < 1:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def bound_after_update(bound: Bound, learning_rate: float, ratio: float, decay: float) -> Bound:
    """The bound on magnitudes after an update, from that before it. `ratio` is `largest_adam_ratio`; `decay` is
    decoupled."""
    step = learning_rate * ratio * (1 + STEP_ROUNDING)
    return (bound * abs(1 - learning_rate * decay) + step) * (1 + WEIGHT_ROUNDING)


class SharedScaling(ModelConverter):
    """Scales that are computed over the ranks with the same layers, in a converter's hooks."""

    group: dist.ProcessGroup | None = None

    def connect(self, mesh: DeviceMesh) -> None:
        self.group = stage_group(mesh)


class MeasuredFloat8(SharedScaling):
    """Scales of weights that FSDP gathers in float8, from their amaxes, in one all-reduce."""

    @torch.no_grad()
    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        if weights := float8_all_gather_weights(models):
            set_scales(weights, measure_amaxes(weights, self.group))


class MeasuredInt8(ModelConverter):
    """The same for weights that FSDP gathers in int8 with one scale, over the ranks that have shards."""

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        set_tensorwise_scales(models)


class Histories(SharedScaling):
    """Amax histories of all delayed layers of a run. `rule` says which amax of a history defines the scale, `margin` is
    the headroom above it in powers of two, `dtypes` are for x, weight and grad_output."""

    def __init__(self, rule: Literal["max", "most_recent"], margin: int, dtypes: Sequence[torch.dtype]) -> None:
        self.rule, self.margin, self.dtypes = rule, margin, dtypes

    @torch.no_grad()
    def after_step(
        self, models: Sequence[nn.Module], learning_rate: float | None, skip: torch.Tensor | None = None
    ) -> None:
        """Appends the amaxes of a step unless its update was skipped. Collective over the group. An amax that is 0 or
        not finite says nothing about the next one, so the previous one is repeated instead."""
        layers = list(amax_histories(models).values())
        if not layers:
            return
        amaxes = [amax for layer in layers for amax in layer.amaxes]
        if learning_rate is not None:
            amax = all_reduce_max(torch.stack(amaxes), self.group).view(len(layers), 3, 1)
            history = torch.stack([layer.history for layer in layers])
            amax = torch.where((amax > 0) & amax.isfinite(), amax, history[..., :1])
            new = torch.cat([amax, history[..., :-1]], -1)
            history = new if skip is None else torch.where(skip > 0, history, new)
            torch._foreach_copy_([layer.history for layer in layers], list(history))
            self.set_scales(layers)
        torch._foreach_zero_(amaxes)

    def hidden_nonfinite(self, models: Sequence[nn.Module]) -> torch.Tensor | None:
        """Whether an amax on this rank since the last step is not finite."""
        amaxes = [amax for layer in amax_histories(models).values() for amax in layer.amaxes]
        return torch.stack(amaxes).isfinite().all().logical_not() if amaxes else None

    def set_scales(self, layers: Sequence[AmaxHistory]) -> None:
        """Computes the scales, which depend only on the history."""
        history = torch.stack([layer.history for layer in layers])
        amax = history[..., 0] if self.rule == "most_recent" else history.amax(-1)
        scales = torch.stack([torchao.amax_to_scale(amax[:, i], dtype) for i, dtype in enumerate(self.dtypes)], 1)
        torch._foreach_copy_([layer.scales for layer in layers], list(scales / 2**self.margin))
        if not all(layer.has_scales for layer in layers):  # only in the first step, since this waits for the device
            known = amax.gt(0) | amax.new_tensor(layers[0].delayed).logical_not()
            for layer, all_known in zip(layers, known.all(1).tolist(), strict=True):
                layer.has_scales = all_known

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Histories by layer path. (JSON numbers represent float32 exactly.)"""
        return {fqn: layer.history.tolist() for fqn, layer in amax_histories(models).items()}

    @torch.no_grad()
    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any], gradient_ratio: float = 1.0) -> None:
        """Restores the histories, output gradients' times `gradient_ratio`. A layer without one uses dynamic scales
        until it has one; a history of another length is truncated, or continues from what there is."""
        layers = amax_histories(models)
        # A checkpoint of another recipe may have numbers for a layer that are no histories.
        state = {fqn: saved for fqn, saved in state.items() if all(isinstance(row, list) for row in saved)}
        for fqn in layers.keys() & state.keys():
            saved = torch.tensor(state[fqn])[:, : layers[fqn].history.shape[1]]
            saved[GRAD_OUTPUT] *= gradient_ratio
            layers[fqn].history[:, : saved.shape[1]] = saved
        if layers:
            self.set_scales(list(layers.values()))
        missing = len(layers.keys() - state.keys())
        if missing:
            logger.info(
                f"float8 delayed: the checkpoint has no amax history of {missing} of {len(layers)} layers, which start "
                "with dynamic scales"
            )


def amax_histories(models: Sequence[nn.Module]) -> dict[str, AmaxHistory]:
    """Of this rank's layers with delayed scaling, by path."""
    return {
        fqn: module.history
        for model in models
        for fqn, module in model.named_modules()
        if isinstance(module, LowPrecisionLinear) and module.history is not None
    }


class WeightBounds(SharedScaling):
    """Scales from bounds that hold under Adam and AdamW, for the weights that FSDP gathers in float8 (torchao's,
    tensorwise). Every `every` steps the weights are measured, which takes an all-reduce."""

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self.betas = [optimizer.beta1, optimizer.beta2]
        self.ratio = largest_adam_ratio(optimizer.beta1, optimizer.beta2)
        # Adam adds weight decay to the gradient, and the ratio holds for any gradient.
        self.decay = optimizer.weight_decay if optimizer.name == "AdamW" else 0.0
        self.every = every
        self.layers: list[str] = []
        self.bounds: torch.Tensor | None = None
        self.age = 0

    @torch.no_grad()
    def after_step(
        self, models: Sequence[nn.Module], learning_rate: float | None, skip: torch.Tensor | None = None
    ) -> None:
        """Updates the bounds after an optimizer step. Every `every` steps, measures instead; collective then, and a
        TrainingError if a weight has exceeded its bound. (If the device skips a step, the bound grows all the same; it
        is still a bound.)"""
        weights = float8_all_gather_weights(models)
        if not weights or learning_rate is None:
            return
        if self.bounds is not None:
            self.bounds = bound_after_update(self.bounds, learning_rate, self.ratio, self.decay)
        self.age += 1
        if self.bounds is None or self.age >= self.every:
            measured = measure_amaxes(weights, self.group).double()
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


def float8_all_gather_weights(models: Sequence[nn.Module]) -> dict[str, Any]:
    """This rank's shards of the weights that are gathered in float8 (torchao's class), by layer path."""
    return {
        fqn: module.weight._local_tensor
        for model in models
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and isinstance(module.weight, DTensor)
        and hasattr(module.weight._local_tensor, "_precomputed_scale")
    }


@torch.no_grad()
def measure_amaxes(weights: Mapping[str, Any], group: dist.ProcessGroup | None) -> torch.Tensor:
    """(number of weights,): the amax of each full weight, in one all-reduce over the ranks that hold shards. NaN in a
    shard becomes inf."""
    shards = [weight._tensor for weight in weights.values()]
    if shards[0].device.type == "cpu":  # torch's norm is slow there
        amaxes = torch.stack([torch.stack(torch.aminmax(shard)) for shard in shards]).abs().amax(1)
    else:
        amaxes = torch.stack(torch._foreach_norm(shards, math.inf))
    return all_reduce_max(amaxes, group)


def set_scales(weights: Mapping[str, Any], amaxes: torch.Tensor) -> None:
    """Sets the scales with which the weights are gathered from now on."""
    for weight, scale in zip(weights.values(), torchao.amax_to_scale(amaxes, torch.float8_e4m3fn), strict=True):
        weight._precomputed_scale = scale


def stage_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks with the same layers as this one, sharded or not: their batches, sequence shards and GEMM shards belong
    to the same tensors. None for all ranks. Collective."""
    if mesh.size(0) == 1:
        return None
    group: dist.ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.flatten(1).tolist())
    return group


def all_reduce_max(amaxes: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Maximum of each amax over the ranks, in one all-reduce. Nonfinite values become inf, since NaN has no order."""
    amaxes = amaxes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if dist.is_initialized():
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    return amaxes
