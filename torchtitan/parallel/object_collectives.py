"""Collectives of Python objects, so that all ranks decide the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.errors import UserError

T = TypeVar("T")


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in rank order, on every rank.

    Args:
        group: of all ranks, such as one with a longer timeout; None for the default group.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_rank_0(read: Callable[[], T]) -> T:
    """Reads on rank 0 and broadcasts the result: a folder may look different from another machine."""
    values = [read() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]


def raise_on_all_ranks(read: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Calls `read` on every rank and returns this rank's result. The ranks wait for each other, in `group`.

    Raises:
        UserError: on every rank, if it was raised on any.
    """
    result, error = None, None
    try:
        result = read()
    except UserError as failure:
        error = failure
    for failed in all_gather_object(error, group):
        if failed is not None:
            raise failed from None
    return result  # type: ignore[return-value]
