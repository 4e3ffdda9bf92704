"""Whether the compiler is at work, how often one function may be compiled, and for which sizes.

- `_guards.TracingContext`: there while something is compiled
- `_dynamo.mark_static`: a size that the compiler takes as a constant
- `_dynamo.config.recompile_limit`: compiled variants of one function, 8 by default
- `_dynamo.config.accumulated_recompile_limit`: the same, over all objects that it is a method of
"""

import contextlib

import torch
from torch._guards import TracingContext


def is_compiling() -> bool:
    """Whether the compiler is at work. torch 2.11 says no in functions that it calls without tracing into them
    (`allow_in_graph`)."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def compile_for_size(x: torch.Tensor, dimension: int) -> None:
    """The function that is being compiled is compiled again for each size of x along this dimension, so only for one
    that hardly ever changes: where all sizes are known at run time only, kernels divide by it for each number."""
    if torch.compiler.is_compiling():
        torch._dynamo.mark_static(x, dimension)


def recompile_limit(count: int) -> contextlib.AbstractContextManager[None]:
    """Within this context a function may be compiled `count` times."""
    patch: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=count)
    return patch


def raise_recompile_limit(count: int) -> None:
    """From now on a function may be compiled at least `count` times."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
