"""The loss over the tokens that count, wherever they are in the global batch."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchtitan.data import Batch
from torchtitan.engine.engine import Engine
from torchtitan.protocols import IGNORE_INDEX


def over_counted_tokens(engine: Engine, microbatches: Sequence[Batch]) -> list[Batch]:
    """The micro-batches of a step with the factor that makes their gradients those of the mean loss over the counted
    tokens of all ranks, where `Engine.loss_scale` divides by all tokens. Does not wait for the device. Collective."""
    labels = [batch.labels for batch in microbatches]
    counted = torch.stack([(of_batch != IGNORE_INDEX).sum() for of_batch in labels]).sum()
    counted = counted.to(engine.device.torch_device, non_blocking=True)
    dist.all_reduce(counted)
    # Ranks that share rows count the same tokens.
    every = dist.get_world_size() * sum(of_batch.numel() for of_batch in labels)
    factor = every / counted.clamp(min=1).float()
    return [dataclasses.replace(batch, factor=factor) for batch in microbatches]
