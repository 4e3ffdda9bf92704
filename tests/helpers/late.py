"""A user's module, `--experimental.custom_import=late`: a GPU is so late that the host is far ahead of it, and what it
does on FSDP's reduce-scatter stream is later still. Contains the models of tiny.py."""

import functools
from collections.abc import Callable
from typing import Any

import tiny  # noqa: F401  registers its models
import torch

from torchtitan.compat.distributed import DefaultReduceScatter
from torchtitan.engine import engine
from torchtitan.parallel.fsdp import _NoReduceScatter

CYCLES = 10**8  # about 50 ms


def late(function: Callable[..., Any], where: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if torch.cuda.is_available() and where():
            torch.cuda._sleep(CYCLES)
        return function(*arguments, **options)

    return wrapped


def beside() -> bool:
    """Not on the compute stream."""
    return bool(torch.cuda.current_stream() != torch.cuda.default_stream())


engine.forward_backward = late(engine.forward_backward, lambda: True)
for reduction in (DefaultReduceScatter, _NoReduceScatter):  # the second call allocates the output, on its stream
    reduction.allocate = late(reduction.allocate, beside)  # type: ignore[method-assign]
