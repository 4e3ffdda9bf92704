"""One training step: forward, backward, clipping, optimizer step, converter hooks."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchtitan.compat.optimizers import fused_step
from torchtitan.converters.linear import weight_unchanged
from torchtitan.data import Batch
from torchtitan.engine.converter_hooks import after_optimizer_step, saturated_nonfinite
from torchtitan.engine.engine import Engine
from torchtitan.models.expert_balance import balance_experts
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.combined import parts_of
from torchtitan.optim.optimizer import set_learning_rate
from torchtitan.optim.skip_step import ShouldSkip, Skip
from torchtitan.parallel.fsdp import reshard, set_last_microbatch
from torchtitan.protocols import IGNORE_INDEX


def train_step(
    engine: Engine,
    microbatches: Sequence[Batch],
    learning_rate: float,
    should_skip: ShouldSkip | None = None,
    step: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains on one global batch: a micro-batch per grad-accumulation step, then one optimizer step.

    A profiler trace labels its parts "forward", "backward" and "optimizer".

    Returns:
        This rank's loss, summed over its tokens (see `sum_over_ranks`), and the gradient norm of the full model before
        clipping: float32 scalars on the device. This does not wait for the device, unless `should_skip` does
        or the optimizer is not fused.
    """
    set_learning_rate(engine.optimizer, learning_rate)
    loss = torch.zeros((), device=engine.device.torch_device)
    with weight_unchanged(engine.model.output):
        for number, batch in enumerate(microbatches):
            set_last_microbatch(engine.stages.values(), last=number == len(microbatches) - 1)
            loss += forward_backward(engine, batch)

    with record_function("optimizer"):
        if engine.step_in_backward is None:
            grad_norm = clip_grad_norm(engine.model.parameters(), engine.config.training.max_norm)
        else:
            grad_norm = engine.step_in_backward.grad_norm()

        skip = Skip()
        if should_skip is not None:
            skip = should_skip(step, loss, grad_norm, saturated_nonfinite(engine), sample_ids(microbatches))
        if engine.step_in_backward is None:  # else the parameters are already updated
            skip = optimizer_step(engine.optimizer, skip)
            # model.zero_grad(), because an optimizer need not own every parameter.
            engine.model.zero_grad()

    after_optimizer_step(engine, learning_rate, skip)
    engine.expert_statistics.update(balance_experts(engine.model, engine.meshes.mesh, engine.config.moe, skip.device))
    return loss, grad_norm


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Skip) -> Skip:
    """Runs the optimizer step unless it is skipped. Returns `skip`, with what the host knows now. Fused optimizers,
    torch's and on GPUs our own, read the decision on the device (as `found_inf`, meant for gradient scaling). For
    others the host must read it, which waits for the device."""
    flag = skip.device
    for part in parts_of(optimizer):
        if flag is None:
            part.step()
        elif part.defaults.get("fused"):
            # With CPU offload the update runs on the host, and this waits for the flag.
            device = next(parameter.device for group in part.param_groups for parameter in group["params"])
            fused_step(part, flag.to(device))
        elif flag.item() > 0:
            skip = Skip(flag, host=True)
        else:
            part.step()
    return skip


def forward_backward(engine: Engine, batch: Batch) -> torch.Tensor:
    """Accumulates gradients. Returns the loss, summed over the tokens of the micro-batch."""
    tokens, labels, inputs = on_device(engine, batch)
    if engine.pipeline is not None:
        with record_function("forward and backward"):
            return engine.pipeline.train(tokens, labels, **inputs)
    with record_function("forward"):
        loss = engine.model(tokens, labels, **inputs)
    with record_function("backward"):
        (loss * engine.loss_scale).backward()
    return loss.detach()


def on_device(engine: Engine, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens and labels (rows, positions on this rank), and the model's other inputs by name."""
    move = functools.partial(torch.Tensor.to, device=engine.device.torch_device, non_blocking=True)
    tokens, labels = move(batch.tokens), move(batch.labels)
    if engine.meshes.context_mesh is not None:
        tokens, labels = tokens[:, engine.positions], labels[:, engine.positions]
    inputs = {} if batch.document_ids is None else {"document_ids": move(batch.document_ids)}
    return tokens, labels, inputs


def sample_ids(microbatches: Sequence[Batch]) -> list[str]:
    """Sample ids of the documents in these micro-batches; a document in two rows appears twice."""
    return [sample for batch in microbatches for row in batch.sample_ids or [] for sample in row]


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
    """Mean loss over the tokens of all ranks' batches. None if the run is to stop before they end; a batch that is None
    has the same effect. Collective."""
    loss, tokens = torch.zeros((), device=engine.device.torch_device), 0
    for batch in batches:
        if should_stop() or batch is None:
            reshard(engine.stages.values())
            return None
        loss += forward(engine, batch)
        tokens += int((batch.labels != IGNORE_INDEX).sum())
    reshard(engine.stages.values())
    total = torch.tensor(tokens, device=loss.device)
    dist.all_reduce(total)
    return sum_over_ranks(engine, loss) / (total // (dist.get_world_size() // engine.meshes.dims.dp))


@torch.no_grad()
def forward(engine: Engine, batch: Batch) -> torch.Tensor:
    """This rank's loss, summed over its tokens of the batch. `reshard` frees the gathered weights afterwards."""
    tokens, labels, inputs = on_device(engine, batch)
    if engine.validation_pipeline is not None:
        return engine.validation_pipeline.evaluate(tokens, labels, **inputs)
    return engine.model(tokens, labels, **inputs)
