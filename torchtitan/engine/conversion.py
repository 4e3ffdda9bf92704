"""Converts the full model to low precision, before it is parallelized."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import JobConfig
from torchtitan.converters import Decision, ModelConverter, Target, apply_converters
from torchtitan.device import Device
from torchtitan.models import MODELS, ModelSpec
from torchtitan.protocols import Decoder, ModelArgs
from torchtitan.registry import deferred

_conversion_report: Callable[..., list[Decision]] = deferred(
    "torchtitan.converters.conversion_report:conversion_report"
)
_add_mtp = deferred("torchtitan.models.mtp:add_mtp")


def conversion_target(config: JobConfig, spec: ModelSpec, device: Device | None, shards: int = 1) -> Target:
    """Where the converted model of this configuration will run; without a device, anywhere."""
    training, parallelism = config.training, config.parallelism
    pipeline = parallelism.pipeline_parallel_degree > 1
    rows = parallelism.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size
    return Target(
        device_type=device.type if device else "meta",
        device_name=device.name if device else "",
        compute_capability=device.compute_capability if device else None,
        amd=device.amd if device else "",
        tokens=rows * training.seq_len // parallelism.context_parallel_degree,
        compile=training.compile,
        dtype=torch.float32 if training.mixed_precision_param == "float32" else torch.bfloat16,
        tensor_parallel=parallelism.tensor_parallel_degree,
        expert_parallel=parallelism.expert_parallel_degree,
        sharding=spec.sharding,
        shards=shards,
        optimizer=config.optimizer,
    )


def build_model(config: JobConfig, args: ModelArgs) -> Decoder:
    """The full model, with the layers of `training.mtp_layers`."""
    spec = MODELS.get(config.model.name)
    model = spec.build(args)
    if config.training.mtp_layers:
        _add_mtp(model, config.training, spec.parallelize)
    return model


def build_converted_model(
    config: JobConfig, args: ModelArgs, target: Target, mesh: DeviceMesh | None = None
) -> tuple[Decoder, list[ModelConverter]]:
    """The full model on the meta device, and the converters applied to it for `target`. Collective. `mesh` is (pp,
    dp_replicate, fsdp, tp), or None if the model will not run."""
    with torch.device("meta"):
        model = build_model(config, args)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, config.training.weight_dtype))
    converters = apply_converters(model, config.model.converters, functools.partial(getattr, config), target)
    if mesh is not None:
        for converter in converters:
            converter.connect(mesh)
    return model, converters


def decisions_of(converters: Sequence[ModelConverter]) -> list[Decision]:
    """What became of each linear layer; empty without a converter of linear layers."""
    return _conversion_report(converter.decisions for converter in converters) if converters else []


def steps_that_compile(converters: Sequence[ModelConverter], compiled: bool) -> int:
    """How many steps may compile, from the first one with these converters on."""
    return int(compiled) + (compiled and any(converter.warms_up for converter in converters))
