"""Custom operators, which the compiler calls without tracing into them, and the profiler counts; functions with
gradients of their own; and functions that a GPU computes in one pass over their data."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from torchtitan.cache import keep_compiled_code_private
from torchtitan.compat.dynamo import is_compiling

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
_LIBRARY = torch.library.Library("torchtitan", "FRAGMENT")


class Function(torch.autograd.Function):
    """A differentiable operation that returns one tensor: the type of `apply`, which torch leaves out."""

    apply: ClassVar[Callable[..., torch.Tensor]]


def operator(name: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Makes a function the operator torchtitan::`name`. `fake` returns, for the same arguments, uninitialized results
    of the same shapes, strides and dtypes. The function must not return an argument or a view of one.

    Not with `torch.library.custom_op`, whose wrapper in Python takes the host three times as long at each call.
    """

    def register(function: F) -> F:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"torchtitan::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.torchtitan, name).default  # type: ignore[no-any-return]

    return register


def traced(name: str, launch: Callable[..., Any]) -> None:
    """Lets compiled code for a GPU launch the Triton kernels of the operator torchtitan::`name` as it launches those
    that it generates, without the operator's Python. `launch` does what the operator does, with
    `torch.library.wrap_triton`. (`torch.library.triton_op` has custom_op's wrapper around eager calls.)"""
    from torchtitan.compat.dispatch import FunctionalTensorMode

    def trace(mode: Any, operation: Any, types: Any, arguments: Any, options: Any) -> Any:
        if arguments[0].device.type != "cuda":
            return mode.__torch_dispatch__(operation, types, arguments, options)
        with mode:
            return launch(*arguments)

    torch.library.register_torch_dispatch(f"torchtitan::{name}", FunctionalTensorMode, trace, lib=_LIBRARY)


def fused(function: Callable[..., R]) -> Callable[..., R]:
    """Compiles `function` into one pass over its data on a GPU; eagerly it would take seven. No gradients flow through
    it. (On CPU the kernels of `kernels.rounding` do it in one pass.)"""
    compiled: list[Callable[..., R]] = []

    @functools.wraps(function)
    def run(*arguments: Any) -> R:
        tensor = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
        if is_compiling() or tensor.device.type != "cuda":  # already inside a larger compilation, or CPU
            return function(*arguments)
        if not all(triton_has(dtype, tensor.device) for dtype in arguments if isinstance(dtype, torch.dtype)):
            return function(*arguments)
        if not compiled:
            keep_compiled_code_private()
            compiled.append(torch.compile(function, dynamic=True))
        # Detached and without grad, parameters, leaves and results look the same to the compiler: it compiles once.
        with torch.no_grad():
            return compiled[0](*(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))

    return run


def triton_has(dtype: torch.dtype, device: torch.device) -> bool:
    """Triton has float8 from Ada (8.9) on; before, it can only be emulated, by torch's own operations."""
    float8 = dtype.is_floating_point and dtype.itemsize == 1
    return not float8 or torch.cuda.get_device_capability(device) >= (8, 9)
