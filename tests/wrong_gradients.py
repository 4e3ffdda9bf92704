"""A user's module: models with faults in their gradients, which losses do not show.

Qwen3s with one in the gradient of q_norm under tensor parallelism; experts whose gradients are averaged over the wrong
ranks."""

from dataclasses import replace
from typing import Any

import tiny  # noqa: F401  registers the model
import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.models import MODELS
from torchtitan.models.moe import mixtures
from torchtitan.models.norm import rms_norm
from torchtitan.models.qwen3.args import Qwen3Args
from torchtitan.models.qwen3.model import NormalizedAttention, Qwen3
from torchtitan.models.transformer import FeedForward, TransformerBlock
from torchtitan.protocols import Decoder


class NotSummed(NormalizedAttention):
    """A rank keeps the gradient of its own heads."""

    def weight(self) -> torch.Tensor:
        parameter = dict(self.q_norm.named_parameters())["weight"]
        assert isinstance(parameter, DTensor)
        return parameter.to_local(grad_placements=[Replicate()])

    def before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(q, self.weight(), self.q_norm.eps), self.k_norm(k)


class SummedTwice(NotSummed):
    """The gradient is twice what it should be, as if its sum over two ranks were summed over them again."""

    def weight(self) -> torch.Tensor:
        weight = self.q_norm.weight
        return 2 * weight - weight.detach()


class Wrong(Qwen3):
    attention: type[NotSummed]

    def make_block(self, args: Qwen3Args, layer: int) -> TransformerBlock:
        return TransformerBlock(args, self.attention(args), FeedForward(args.dim, args.ffn_dim))


def with_wrong_group(model: Decoder, *rest: Any) -> None:
    """The gradients of experts are averaged over as many ranks as those of the other weights."""
    MODELS.get("sparse").parallelize(model, *rest)
    for mixture in mixtures(model).values():
        mixture.dispatch.gradient_scale = 1.0  # type: ignore[attr-defined]


MODELS.register("WrongGroup", replace(MODELS.get("sparse"), parallelize=with_wrong_group))

for fault in (NotSummed, SummedTwice):
    build = type(Wrong.__name__, (Wrong,), {"attention": fault})
    MODELS.register(fault.__name__, replace(MODELS.get("tiny_qwen3"), build=build))
