"""Keeps the load of experts even, and measures it.

`moe.balance = "bias"`: each expert has a bias on its score for the choice of experts, which grows after a step in which
the expert got less than the mean load, and shrinks otherwise (arXiv 2408.15664). "loss": a loss for an even load within
each sequence is added to the model's (arXiv 2412.19437, equations 17 to 20). `moe.z_loss_coefficient` adds one for
small logits of the router (ST-MoE, arXiv 2202.08906, equation 5).

Shapes: B sequences, S positions of a sequence on this rank, E experts, k experts of a token, L layers with experts.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.training import MoEKeys as MoEConfig
from torchtitan.kernels.operator import Function
from torchtitan.models.moe import mixtures
from torchtitan.parallel.collectives import all_reduce_no_grad
from torchtitan.parallel.object_collectives import all_gather_object


def add_router_losses(model: nn.Module, config: MoEConfig, scale: float, seq_len: int, groups: Sequence[str]) -> None:
    """Gives each router the losses that `config` asks for. `scale` multiplies the loss of a token before the backward
    pass; `seq_len` counts the full sequence; `groups` names the groups of ranks that share one."""
    for mixture in mixtures(model).values():
        if config.balance == "loss":
            of_sequence = scale * seq_len * config.loss_coefficient
            mixture.router.balance_loss = functools.partial(
                _with_balance_loss, scale=of_sequence, seq_len=seq_len, groups=tuple(groups)
            )
        if config.z_loss_coefficient is not None:
            mixture.router.z_loss = functools.partial(_with_z_loss, scale=scale * config.z_loss_coefficient)


def _with_z_loss(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """`logits`, (B, S, E), to whose gradient the loss adds its own: the sum of logsumexp(logits)² over tokens."""
    return _AddLoss.apply(logits, logits.logsumexp(-1).square().sum(), scale)


def _with_balance_loss(
    scores: torch.Tensor, chosen: torch.Tensor, scale: float, seq_len: int, groups: Sequence[str]
) -> torch.Tensor:
    """`scores`, (B, S, E), to whose gradient the loss adds its own. The loss is E / k times the sum over experts of the
    share of the sequence's choices times the mean score, so 1 for an even load. `chosen` is (B, S, k)."""
    batch, _, experts = scores.shape
    k, flat = chosen.shape[-1], chosen.flatten(1)
    counts = torch.zeros(batch, experts, device=scores.device).scatter_add_(1, flat, torch.ones_like(flat).float())
    for group in groups:
        counts = all_reduce_no_grad(counts, group)
    shares = counts * (experts / (k * seq_len))
    means = (scores / scores.sum(-1, keepdim=True)).sum(1) / seq_len
    return _AddLoss.apply(scores, (shares * means).sum(), scale)


class _AddLoss(Function):
    """The identity of x; `loss` gets the gradient `scale`, as if scale * loss were added to the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, ctx.scale), None


class ExpertMetrics(NamedTuple):
    """The load of experts in one step."""

    load: dict[str, list[float]]  # path of the layer -> rows of each expert, divided by the layer's mean
    entropy: float  # entropy of the router's scores, in nats; mean over tokens and layers

    @property
    def summary(self) -> dict[str, float]:
        """For the metrics of a step: the largest and the smallest load of any expert, and the entropy."""
        return {
            "expert_load_max": max(max(layer) for layer in self.load.values()),
            "expert_load_min": min(min(layer) for layer in self.load.values()),
            "router_entropy": self.entropy,
        }


def expert_metrics(statistics: Mapping[str, torch.Tensor], top_k: int, mesh: DeviceMesh) -> ExpertMetrics | None:
    """From what `balance_experts` returned, of the full model; None without experts. Collective."""
    own = {name: seen.tolist() for name, seen in statistics.items()}
    stages = all_gather_object(own, mesh.get_group("pp")) if mesh["pp"].size() > 1 else [own]
    seen = {name: layer for stage in stages for name, layer in stage.items()}
    if not seen:
        return None
    load, entropies = {}, []
    for name, (*rows, entropy) in seen.items():
        load[name] = [expert * len(rows) / sum(rows) for expert in rows]
        entropies.append(entropy * top_k / sum(rows))
    by_number = sorted(load.items(), key=lambda layer: int(layer[0].split(".")[1]))
    return ExpertMetrics(dict(by_number), sum(entropies) / len(entropies))


@torch.no_grad()
def balance_experts(
    model: nn.Module, mesh: DeviceMesh, config: MoEConfig, skip: torch.Tensor | None = None
) -> Mapping[str, torch.Tensor]:
    """Call after each optimizer step: updates the biases, by numbers whose mean is 0, since only differences matter,
    unless `skip`, a scalar on the device, is above 0. Collective over the mesh (pp, dp_replicate, fsdp, tp). Returns
    the `MoE.statistics` of the global batch by path."""
    by_path = mixtures(model)
    if not by_path:
        return {}
    seen = torch.stack([mixture.statistics for mixture in by_path.values()])
    for dim in ("dp_replicate", "fsdp", "tp"):
        if mesh[dim].size() > 1:
            dist.all_reduce(seen, group=mesh.get_group(dim))
    for mixture, statistics in zip(by_path.values(), seen, strict=True):
        mixture.statistics.zero_()
        if config.balance == "bias":
            load = statistics[:-1]
            signs = (load.mean() - load).sign()
            new = (mixture.expert_bias + config.bias_update_speed * (signs - signs.mean())).to(torch.float32)
            mixture.expert_bias.copy_(new if skip is None else torch.where(skip > 0, mixture.expert_bias, new))
    return dict(zip(by_path, seen, strict=True))
