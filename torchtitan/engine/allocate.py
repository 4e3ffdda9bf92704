"""Allocates this rank's shards, if they fit into memory."""

import math
import socket
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.config import JobConfig
from torchtitan.device import Device
from torchtitan.errors import ConfigError
from torchtitan.models.moe import reset_buffers
from torchtitan.optim.optimizer import bytes_of_state
from torchtitan.parallel.object_collectives import all_gather_object
from torchtitan.protocols import Decoder


def allocate(model: Decoder, stages: Sequence[Decoder], config: JobConfig, device: Device) -> None:
    """Allocates this rank's shards, uninitialized but for the buffers of mixtures of experts."""
    offload = config.training.enable_cpu_offload
    if not offload:
        check_memory(model, config, device)
    for stage in stages:
        stage.to_empty(device="cpu" if offload else device.torch_device)
        for module in stage.modules() if offload else ():  # FSDP gathers parameters onto the device, but no buffers
            module._buffers.update(
                {name: buffer.to(device.torch_device) for name, buffer in module.named_buffers(recurse=False)}
            )
    reset_buffers(model)


def state_bytes(model: nn.Module, config: JobConfig) -> float:
    """Lower bound of what this rank holds throughout training. The model may be on the meta device."""
    gradients = 0 if config.optimizer.early_step_in_backward else 1
    total = 0.0
    for parameter in model.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        total += local.numel() * (parameter.element_size() * (1 + gradients) + bytes_of_state(config.optimizer))
    return total


def check_memory(model: nn.Module, config: JobConfig, device: Device) -> None:
    """Raises a ConfigError, the same on every rank, if any machine or GPU has too little memory. Collective."""
    place = (socket.gethostname(), device.torch_device.index if device.type == "cuda" else None)
    ranks = all_gather_object((place, state_bytes(model, config), device.memory_capacity_bytes()))
    for where in {place for place, _, _ in ranks}:
        need = sum(size for place, size, _ in ranks if place == where)
        capacity = min((size for place, _, size in ranks if place == where), default=math.inf)
        if need > capacity:
            noun = "GPU" if device.type == "cuda" else "machine"
            raise ConfigError(
                f"model.flavor = {config.model.flavor}: weights, gradients and optimizer state alone need "
                f"{need / 2**30:,.0f} GiB on one {noun}, which has {capacity / 2**30:,.0f} GiB; use a smaller flavor, "
                f"more {noun}s, or smaller states (training.weight_dtype, optimizer.name = AdamW8bit). "
                "--job.plan estimates the memory of a run."
            )
