"""Computes the next step's scales from a step's amaxes, the same on all ranks."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.compat.torchao import amax_to_scale
from torchtitan.converters.amax import all_reduce_max
from torchtitan.converters.float8_delayed import OUT_GRAD, DelayedLinear
from torchtitan.logging import logger


class Histories:
    """Amax histories of all delayed layers of a run.

    Args:
        rule: which amax of a history defines the scale.
        margin: headroom above it, in powers of two.
    """

    def __init__(self, rule: Literal["max", "most_recent"], margin: int) -> None:
        self.rule = rule
        self.margin = margin

    @torch.no_grad()
    def after_step(
        self,
        models: Sequence[nn.Module],
        learning_rate: float | None,
        group: dist.ProcessGroup | None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Appends the amaxes of a step unless its update was skipped. Collective over the group.

        An amax that is 0 or not finite says nothing about the next one, so the previous one is repeated instead.
        """
        layers = list(delayed_layers(models).values())
        if not layers:
            return
        amaxes = [amax for layer in layers for amax in layer.amaxes]
        if learning_rate is not None:
            amax = all_reduce_max(torch.stack(amaxes), group).view(len(layers), 3, 1)
            history = torch.stack([layer.history for layer in layers])
            amax = torch.where((amax > 0) & amax.isfinite(), amax, history[..., :1])
            new = torch.cat([amax, history[..., :-1]], -1)
            history = new if skip is None else torch.where(skip > 0, history, new)
            torch._foreach_copy_([layer.history for layer in layers], list(history))
            self.set_scales(layers)
        torch._foreach_zero_(amaxes)

    def nonfinite(self, models: Sequence[nn.Module]) -> torch.Tensor | None:
        """Whether an amax on this rank since the last step is not finite."""
        amaxes = [amax for layer in delayed_layers(models).values() for amax in layer.amaxes]
        return torch.stack(amaxes).isfinite().all().logical_not() if amaxes else None

    def set_scales(self, layers: Sequence[DelayedLinear]) -> None:
        """Computes the scales, which depend only on the history."""
        history = torch.stack([layer.history for layer in layers])
        amax = history[..., 0] if self.rule == "most_recent" else history.amax(-1)
        dtypes = layers[0].casts.dtypes
        scales = torch.stack([amax_to_scale(amax[:, i], dtype) for i, dtype in enumerate(dtypes)], 1)
        torch._foreach_copy_([layer.scales for layer in layers], list(scales / 2**self.margin))
        if not all(layer.has_scales for layer in layers):  # only in the first step, since this waits for the device
            known = amax.gt(0) | amax.new_tensor(layers[0].casts.delayed).logical_not()
            for layer, all_known in zip(layers, known.all(1).tolist(), strict=True):
                layer.has_scales = all_known

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Histories by layer path. (JSON numbers represent float32 exactly.)"""
        return {fqn: layer.history.tolist() for fqn, layer in delayed_layers(models).items()}

    @torch.no_grad()
    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any], gradient_ratio: float = 1.0) -> None:
        """Restores the histories. A layer without one uses dynamic scales until it has one; a history of another length
        is truncated, or continues from what there is.

        Args:
            gradient_ratio: factor on the amaxes of output gradients.
        """
        layers = delayed_layers(models)
        # A checkpoint of another recipe may have numbers for a layer that are no histories.
        state = {fqn: saved for fqn, saved in state.items() if all(isinstance(row, list) for row in saved)}
        for fqn in layers.keys() & state.keys():
            saved = torch.tensor(state[fqn])[:, : layers[fqn].history.shape[1]]
            saved[OUT_GRAD] *= gradient_ratio
            layers[fqn].history[:, : saved.shape[1]] = saved
        if layers:
            self.set_scales(list(layers.values()))
        missing = len(layers.keys() - state.keys())
        if missing:
            logger.info(
                f"float8 delayed: the checkpoint has no amax history of {missing} of {len(layers)} layers, which start "
                "with dynamic scales"
            )


def delayed_layers(models: Sequence[nn.Module]) -> dict[str, DelayedLinear]:
    return {fqn: m for model in models for fqn, m in model.named_modules() if isinstance(m, DelayedLinear)}
