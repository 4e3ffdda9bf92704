"""Expert parallelism: ranks hold different experts of a layer and exchange rows of tokens with an all-to-all before and
after computing them (GShard, arXiv 2006.16668).

The experts are spread over the ranks of dp_shard x cp x tp. The other dimension of those ranks shards each expert's
weights (FSDP). A rank's tokens are its own everywhere else, too: under tensor parallelism, its part of the sequence.

Shapes: R rows of this rank's tokens, M rows that it computes, D channels, E experts, P ranks that share the experts.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.compat.distributed import functional_collectives as funcol
from torchtitan.kernels.grouped_8bit import round_expert_rows
from torchtitan.kernels.grouped_gemm import ends_of, reorder_rows
from torchtitan.kernels.operator import Function, operator
from torchtitan.kernels.quantize import Quantized
from torchtitan.parallel.collectives import wait_tensor
from torchtitan.parallel.fsdp import with_experts


class ExpertDispatch:
    """Sends rows to the ranks that have their experts, and the results back; rows and their gradients in `dtype`, int8
    or float8 (None: as they are). `gradient_scale` multiplies the gradients of the experts' weights, since FSDP divides
    them by another number of ranks than others. A plan, whose fake tensors do not show the routing, sets how many rows
    arrive for each one that this rank sends: `assumed_load`."""

    def __init__(self, mesh: DeviceMesh, gradient_scale: float) -> None:
        self.group, self.size = mesh.get_group().group_name, mesh.size()
        self.gradient_scale = gradient_scale
        self.dtype: torch.dtype | None = None
        self.assumed_load: float | None = None

    def __call__(
        self, experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """As `models.moe.Dispatch` says."""
        if self.size == 1:
            out = experts(_scale_gradient(rows, 1 / self.gradient_scale), ends_of(counts))
            return _scale_gradient(out, self.gradient_scale)
        received = exchange_counts(counts, self.group, self.size)  # (P, E / P): rows from each rank for each expert
        splits = torch.stack([counts.view(self.size, -1).sum(1), received.sum(1)]).cpu()  # waits for the device
        arrived = exchange_rows(rows, splits, self._received_rows(splits, rows.shape[0]), self.group, self.dtype)
        # Rows arrive by rank, then by expert; the experts need them by expert, then by rank.
        order, place = _transposed_order(received, arrived.shape[0])
        arrived = reorder_rows(_scale_gradient(arrived, 1 / self.gradient_scale), order, place)
        out = experts(arrived, ends_of(received.sum(0)))
        out = reorder_rows(_scale_gradient(out, self.gradient_scale), place, order)
        return exchange_rows(out, splits.flip(0), rows.shape[0], self.group, self.dtype)

    def _received_rows(self, splits: torch.Tensor, sent: int) -> int:
        """The number of rows that this rank computes; it sends `sent`."""
        if self.assumed_load is not None:
            return round(self.assumed_load * sent)
        return splits[1].sum().item()  # type: ignore[return-value]  # of integers


def prefetch_experts(blocks: list[nn.Module], experts: Sequence[nn.Module]) -> None:
    """Gathers the next block and its experts while a block computes. By default FSDP gathers one group ahead in the
    backward pass: the experts of the same block. In the forward pass it gathers as far ahead as the host is,
    which waits in each block for the numbers of rows."""
    groups: Any = [with_experts(block, experts) for block in blocks]
    for group, next_group in itertools.pairwise(groups):
        group[0].set_modules_to_forward_prefetch(next_group)
        next_group[0].set_modules_to_backward_prefetch(group[::-1])


def _transposed_order(received: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From rows ordered by (rank, expert) to rows ordered by (expert, rank): the index of a gather, and its inverse.
    received: (P, E / P) int64, rows of each rank for each expert."""
    ranks, experts = received.shape
    flat = received.flatten()
    # Where each run of rows of one rank and expert starts in both orders.
    start = flat.cumsum(0) - flat
    by_expert = received.t().flatten()
    new_start = (by_expert.cumsum(0) - by_expert).view(experts, ranks).t().flatten()
    position = torch.arange(rows, device=received.device)
    run = torch.searchsorted(flat.cumsum(0), position, right=True)
    place = position - start[run] + new_start[run]
    return torch.empty_like(place).scatter_(0, place, position), place


class _ScaleGradient(Function):
    """The identity; the gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def _scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else _ScaleGradient.apply(x, factor)


# Custom operators: the compiler must not specialize on the number of rows, which changes in every step.
@operator("exchange_rows", lambda x, splits, rows, group, dtype: x.new_empty(rows, x.shape[1]))
def exchange_rows(
    x: torch.Tensor, splits: torch.Tensor, rows: int, group: str, dtype: torch.dtype | None
) -> torch.Tensor:
    """An all-to-all of rows, from (rows to send, D), by receiving rank, to (rows, D), by sending rank; differentiable.
    splits: (2, P) int64 on the CPU, rows to send to and to receive from each rank. Rows and gradients are sent in
    `dtype`, int8 or float8, each row with its own scale; None: as they are."""
    send, receive = splits.tolist()
    message = x.contiguous() if dtype is None else pack_rows(x, dtype)
    arrived = wait_tensor(funcol.all_to_all_single(message, receive, send, group))  # type: ignore[arg-type]
    return arrived if dtype is None else unpack_rows(arrived, dtype, x.dtype)


def _save_splits(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, splits, _, ctx.group, ctx.dtype = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(splits)


def _exchange_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (splits,) = ctx.saved_tensors
    return exchange_rows(grad, splits.flip(0), ctx.rows, ctx.group, ctx.dtype), None, None, None, None


torch.library.register_autograd("torchtitan::exchange_rows", _exchange_back, setup_context=_save_splits)


def pack_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(rows, D) to (rows, D + 4) bytes: each row rounded to 8 bits, and its float32 scale inverse."""
    data, scale_inverse = round_expert_rows(x, dtype)
    return torch.cat([data.view(torch.uint8), scale_inverse.view(torch.uint8)], dim=1)


def unpack_rows(message: torch.Tensor, dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """The rows of a message of `pack_rows`, in `to`."""
    data, scale_inverse = message[:, :-4].contiguous().view(dtype), message[:, -4:].contiguous().view(torch.float32)
    return Quantized(data, scale_inverse).dequantize(to)


@operator("exchange_counts", lambda counts, group, size: counts.new_empty(size, counts.shape[0] // size))
def exchange_counts(counts: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """(E,) rows of each expert on this rank to (P, E / P) rows of each rank for this rank's experts; int64."""
    received = wait_tensor(funcol.all_to_all_single(counts, None, None, group))  # type: ignore[arg-type]
    return received.view(size, -1)


def gather_with_block(block: nn.Module, experts: nn.Module) -> None:
    """Lets the experts' own FSDP group be gathered and reduced at the block's boundaries. FSDP acts in hooks of the
    forward pass, so the block's, which may be compiled, runs inside the experts'. Call it before `fully_shard`."""
    experts.forward = block.forward
    # Wrapped, since assigning a module would make it a child of the block.
    block.forward = functools.update_wrapper(functools.partial(experts), block.forward)
