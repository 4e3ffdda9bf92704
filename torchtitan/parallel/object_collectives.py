"""Collectives of Python objects, so that all ranks decide the same."""

import hashlib
import platform
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.errors import ConfigError, UserError

T = TypeVar("T")


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of the group, in rank order, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_on_all_ranks(read: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """This rank's result of `read`; a UserError on any rank is raised on every rank. Collective, in `group`."""
    result, error = None, None
    try:
        result = read()
    except UserError as failure:
        error = failure
    for failed in all_gather_object(error, group):
        if failed is not None:
            raise failed from None
    return result  # type: ignore[return-value]


def from_rank_0(read: Callable[[], T]) -> T:
    """What rank 0 reads: a folder may look different from another machine. A UserError is raised on every rank."""
    values = [raise_on_all_ranks(lambda: read() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]


def refuse_differences(values: Mapping[str, object], remedy: str) -> None:
    """Raises a ConfigError on every rank if they have different values, with the first such name, who has which, and
    the remedy. A rank that leaves its machine's values to another one passes none."""
    texts = {name: str(value) for name, value in values.items()}
    marks = all_gather_object(texts and hashlib.sha256(repr(sorted(texts.items())).encode()).digest())
    if len({mark for mark in marks if mark}) < 2:  # so that thousands of equal names are not sent
        return
    (first_rank, expected), *others = [
        (f"rank {rank} on {machine}", texts)
        for rank, (machine, texts) in enumerate(all_gather_object((platform.node(), texts)))
        if texts
    ]
    for rank, actual in others:
        for name in [*expected, *actual]:
            left, right = expected.get(name, "missing"), actual.get(name, "missing")
            if left != right:
                who = f"{left} on {first_rank}, {right} on {rank}"
                raise ConfigError(f"{name} differs between machines: {who}; {remedy}.")
