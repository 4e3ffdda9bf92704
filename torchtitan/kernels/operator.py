"""Custom operators, which the compiler calls without tracing into them, and the profiler counts; and functions with
gradients of their own."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class Function(torch.autograd.Function):
    """A differentiable operation that returns one tensor: the type of `apply`, which torch leaves out."""

    apply: ClassVar[Callable[..., torch.Tensor]]


def operator(name: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Makes a function the operator torchtitan::`name`. `fake` returns, for the same arguments, uninitialized results
    of the same shapes, strides and dtypes."""

    def register(function: F) -> F:
        operation: Any = torch.library.custom_op(f"torchtitan::{name}", function, mutates_args=())
        operation.register_fake(fake)
        return operation  # type: ignore[no-any-return]

    return register
