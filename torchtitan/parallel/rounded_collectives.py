"""Tensor parallelism that all-gathers activations and gradients in 8 bits, if all layers that use them round alike:
half the bytes of bf16, and each token is rounded by one rank, once for all layers. Rows are tokens, so rounding by row
commutes with the gather."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from torchtitan.compat.distributed import functional_collectives as funcol
from torchtitan.parallel.collectives import (
    all_gather,
    all_gather_no_grad,
    reduce_scatter,
    reduce_scatter_no_grad,
    wait_tensor,
)
from torchtitan.parallel.tensor import AllGather


@runtime_checkable
class Rounds(Protocol):
    """A linear layer that says how it rounds its input and the gradient of its output."""

    def gathers(self, overlaps: bool) -> tuple[Any, Any]:
        """(format, whether to keep this rank's shard in high precision) of each, or None for high precision."""


def collectives_for(linears: Sequence[nn.Module], overlaps: bool) -> tuple[AllGather, AllGather]:
    """How to all-gather the input of these layers, and how to reduce-scatter their output, whose gradient is gathered:
    rounded if all of them name the same format, else as it is.

    Args:
        linears: layers with the same input; one that does not say how it rounds needs high precision.
        overlaps: GEMMs hide collectives (asynchronous tensor parallelism).
    """
    forms = {linear.gathers(overlaps) if isinstance(linear, Rounds) else (None, None) for linear in linears}
    of_input, of_gradient = forms.pop() if len(forms) == 1 else (None, None)
    gather = _rounded(True, *of_input) if of_input else all_gather
    return gather, _rounded(False, *of_gradient) if of_gradient else reduce_scatter


@functools.cache  # one function for all layers, so that one block's compiled code serves all
def _rounded(gathers: bool, form: Any, keep_shard: bool) -> AllGather:
    """`all_gather`, or a `reduce_scatter`, whose all-gather (of the tensor or of the gradient) is in this format."""

    @torch.compiler.allow_in_graph
    class RoundedCollective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
            ctx.source = dim, group
            return form.gather(x, _Tokens(dim, group), keep_shard) if gathers else reduce_scatter_no_grad(x, dim, group)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            if gathers:
                return reduce_scatter_no_grad(grad, *ctx.source), None, None
            return form.gather(grad, _Tokens(*ctx.source), keep_shard), None, None

    return RoundedCollective.apply


class _Tokens:
    """Collectives of 8-bit tokens."""

    def __init__(self, dim: int, group: str) -> None:
        self.source = dim, group

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" and x.dtype.is_floating_point and x.dtype.itemsize == 1:  # gloo has no float8
            return all_gather_no_grad(x.view(torch.uint8), *self.source).view(x.dtype)
        return all_gather_no_grad(x, *self.source)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return wait_tensor(funcol.all_reduce(x, "max", self.source[1]))  # type: ignore[arg-type]
