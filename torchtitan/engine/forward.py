"""Forward passes without gradients, and losses over all ranks."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from torchtitan.data import Batch
from torchtitan.engine.engine import Engine, on_device
from torchtitan.parallel.fsdp import reshard
from torchtitan.protocols import IGNORE_INDEX


def sum_over_ranks(engine: Engine, loss: torch.Tensor) -> torch.Tensor:
    """The total loss over all ranks' tokens, from each rank's own sum. Collective."""
    return over_ranks(engine, loss, [])[0]


def over_ranks(engine: Engine, loss: torch.Tensor, numbers: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sum_over_ranks`; in the same collective, the numbers of each rank: (ranks, numbers), float32."""
    of_ranks = torch.zeros(dist.get_world_size(), len(numbers))
    of_ranks[dist.get_rank()] = torch.tensor(numbers)
    sums = torch.cat([loss.reshape(1), of_ranks.flatten().to(loss.device)])
    dist.all_reduce(sums)
    # Tensor-parallel ranks have the same loss; ranks without the last stage have 0.
    return sums[0] / engine.meshes.dims.tp, sums[1:].view_as(of_ranks)


@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[Batch | None], should_stop: Callable[[], bool]) -> torch.Tensor | None:
    """Mean loss over the tokens of all ranks' batches; None if the run is to stop, or a batch is None. Collective."""
    loss, tokens = torch.zeros((), device=engine.device.torch_device), 0
    for batch in batches:
        if should_stop() or batch is None:
            reshard(engine.pipeline_stages.values())
            return None
        loss += forward(engine, batch)
        tokens += int((batch.labels != IGNORE_INDEX).sum())
    reshard(engine.pipeline_stages.values())
    total = torch.tensor(tokens, device=loss.device)
    dist.all_reduce(total)
    return sum_over_ranks(engine, loss) / (total // (dist.get_world_size() // engine.meshes.dims.dp))


@torch.no_grad()
def forward(engine: Engine, batch: Batch) -> torch.Tensor:
    """This rank's loss, summed over its tokens of the batch. `reshard` frees the gathered weights afterwards."""
    tokens, labels, inputs = on_device(engine, batch)
    if engine.validation_pipeline is not None:
        return engine.validation_pipeline.run(tokens, labels, **inputs)
    return engine.model(tokens, labels, **inputs)


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
