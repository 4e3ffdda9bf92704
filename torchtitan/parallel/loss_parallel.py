"""Cross-entropy over logits that tensor parallelism shards along the vocabulary.

Shapes: T tokens, V vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallel.collectives import all_gather
from torchtitan.protocols import IGNORE_INDEX, CrossEntropyFunction


def vocab_parallel_cross_entropy(mesh: DeviceMesh) -> CrossEntropyFunction:
    """`loss.cross_entropy` for logits (T, V / ranks): the ranks exchange three numbers per token (Megatron,
    arXiv 1909.08053, section 3)."""
    rank, group = mesh.get_local_rank(), mesh.get_group()

    def vocab_parallel(
        logits: torch.Tensor, labels: torch.Tensor, z_loss: float | None = None, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        capped = logits if softcap is None else softcap * (logits.float() / softcap).tanh()
        largest = capped.amax(-1, keepdim=True).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = capped.float().sub_(largest)
        counted = (labels != IGNORE_INDEX).unsqueeze(-1)
        label = labels.unsqueeze(-1) - rank * logits.shape[1]
        is_local = (label >= 0) & (label < logits.shape[1])
        label = label.where(is_local, 0)
        of_label = shifted.gather(-1, label) * is_local
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(-1, keepdim=True), of_label])
        dist.all_reduce(sums, group=group)
        total, of_label = sums
        loss = ((total.log() - of_label) * counted).sum()
        probabilities /= total
        if z_loss is not None:
            probabilities *= 1 + 2 * z_loss * (largest + total.log())
        probabilities.scatter_add_(-1, label, -is_local.float())
        if softcap is not None:
            probabilities *= 1 - (logits.float() / softcap).tanh().square()
        return loss, probabilities.mul_(counted).to(logits.dtype)

    return vocab_parallel


def all_gather_cross_entropy(cross_entropy: CrossEntropyFunction, mesh: DeviceMesh) -> CrossEntropyFunction:
    """`cross_entropy` for logits (T, V / ranks): every rank all-gathers the logits to (T, V)."""
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name

    def gathered(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, grad = cross_entropy(all_gather(logits, 1, group), labels, **options)
        return loss, grad.chunk(size, 1)[rank]

    return gathered
