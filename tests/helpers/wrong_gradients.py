"""A user's module: models with faults that only several ranks have, most of which losses do not show."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import tiny  # noqa: F401  registers the model
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.converters import gather
from torchtitan.models import MODELS
from torchtitan.models.moe import mixtures
from torchtitan.models.norm import rms_norm
from torchtitan.models.transformer import Attention, Transformer
from torchtitan.protocols import Decoder


class NotSummed(Attention):
    """A rank keeps the gradient of its own heads."""

    def weight(self) -> torch.Tensor:
        parameter = dict(self.q_norm.named_parameters())["weight"]
        return parameter.to_local(grad_placements=[Replicate()]) if isinstance(parameter, DTensor) else parameter

    def before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(q, self.weight(), self.q_norm.eps), self.k_norm(k)


class SummedTwice(NotSummed):
    """The gradient is twice what it should be, as if its sum over two ranks were summed over them again."""

    def weight(self) -> torch.Tensor:
        weight = self.q_norm.weight
        sharded = isinstance(dict(self.q_norm.named_parameters())["weight"], DTensor)
        return 2 * weight - weight.detach() if sharded and dist.get_world_size() > 1 else weight


def with_wrong_group(model: Decoder, *rest: Any) -> None:
    """The gradients of experts are averaged over as many ranks as the gradients of the other weights."""
    MODELS.get("sparse").parallelize(model, *rest)
    for mixture in mixtures(model).values():
        mixture.dispatch.gradient_scale = 1.0  # type: ignore[attr-defined]


def with_unsummed_norms(model: Decoder, *rest: Any) -> None:
    """A rank keeps the gradient of a block's norm from its own part of the sequence."""
    MODELS.get("tiny_qwen3").parallelize(model, *rest)
    for block in model.layers.values():
        norm: Any = block.ffn_norm
        if isinstance(norm.weight, DTensor) and norm.weight.device_mesh.size() > 1:
            setattr(norm, "forward", partial(unsummed_norm, norm))  # noqa: B010


def unsummed_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    parameter = dict(norm.named_parameters())["weight"]
    return rms_norm(x, parameter.to_local(grad_placements=[Replicate()]), norm.eps)


def with_halved_gradients(model: Decoder, *rest: Any) -> None:
    """Gradients are averaged over the ranks of FSDP once too often."""
    MODELS.get("tiny_qwen3").parallelize(model, *rest)
    for parameter in model.parameters():
        if dist.get_world_size() > 1:
            parameter.register_post_accumulate_grad_hook(lambda weight: weight.grad.div_(2))


def with_drifting_norms(model: Decoder, *rest: Any) -> None:
    """The second rank's copies of norms get no gradient."""
    MODELS.get("tiny_qwen3").parallelize(model, *rest)
    for name, parameter in model.named_parameters():
        if "norm" in name and dist.get_rank() == 1:
            parameter.register_post_accumulate_grad_hook(lambda weight: weight.grad.zero_())


def with_lost_microbatches(model: Decoder, *rest: Any) -> None:
    """A pipeline's first stage gets no gradient of every second micro-batch."""
    MODELS.get("tiny_qwen3").parallelize(model, *rest)
    if model.output is None:
        counter = itertools.count()
        last = list(model.layers.values())[-1]

        def lose(block: nn.Module, inputs: Any, out: torch.Tensor) -> None:
            if next(counter) % 2:
                out.register_hook(torch.zeros_like)

        last.register_forward_hook(lose)


def with_wrong_positions(model: Decoder, *rest: Any) -> None:
    """A rank rotates its part of the sequence as if it were the first."""
    MODELS.get("tiny_qwen3").parallelize(model, *rest)
    if model.positions is not None:
        model.positions = torch.arange(len(model.positions))


def of_own_shard(amax: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A scale that is not the same on all ranks."""
    return shared_scale(amax, mesh) * (1 + mesh.get_local_rank())


shared_scale, gather.tensorwise_scale = gather.tensorwise_scale, of_own_shard

FAULTS = {
    "UnsummedNorms": with_unsummed_norms,
    "DriftingNorms": with_drifting_norms,
    "HalvedGradients": with_halved_gradients,
    "LostMicrobatches": with_lost_microbatches,
    "WrongPositions": with_wrong_positions,
}
for name, parallelize in FAULTS.items():
    MODELS.register(name, replace(MODELS.get("tiny_qwen3"), parallelize=parallelize))
MODELS.register("WrongGroup", replace(MODELS.get("sparse"), parallelize=with_wrong_group))

for fault in (NotSummed, SummedTwice):
    build = type("Wrong", (Transformer,), {"attention": fault})
    MODELS.register(fault.__name__, replace(MODELS.get("tiny_qwen3"), build=build))
