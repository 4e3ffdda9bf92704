"""Converts the full model to low precision, before it is parallelized."""

import functools
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import JobConfig
from torchtitan.converters import (
    Decision,
    ModelConverter,
    Target,
    apply_converters,
    conversion_report,
)
from torchtitan.models import MODELS
from torchtitan.protocols import Decoder, ModelArgs


def build_converted_model(
    config: JobConfig, args: ModelArgs, target: Target, mesh: DeviceMesh
) -> tuple[Decoder, list[ModelConverter]]:
    """The full model on the meta device, and the converters applied to it. Collective.

    Args:
        args: model sizes.
        target: where low-precision layers will run.
        mesh: (pp, dp_replicate, fsdp, tp).
    """
    with torch.device("meta"):
        model = MODELS.get(config.model.name).build(args)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, config.training.weight_dtype))
    converters = apply_converters(model, config.model.converters, functools.partial(getattr, config), target)
    for converter in converters:
        converter.connect(mesh)
    return model, converters


def decisions_of(converters: Sequence[ModelConverter]) -> list[Decision]:
    """What became of each linear layer; empty without a converter of linear layers."""
    return conversion_report(converter.decisions for converter in converters)


def steps_that_compile(converters: Sequence[ModelConverter], compiled: bool) -> int:
    """How many steps may compile, from the first one with these converters on."""
    return int(compiled) + (compiled and any(converter.warms_up for converter in converters))
