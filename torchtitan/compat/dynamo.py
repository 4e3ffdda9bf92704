"""Whether the compiler is at work, and how often one function may be compiled.

- `_guards.TracingContext`: there while something is compiled
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


def recompile_limit(count: int) -> contextlib.AbstractContextManager[None]:
    """Within this context a function may be compiled `count` times."""
    patch: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=count)
    return patch


def raise_recompile_limit(count: int) -> None:
    """From now on a function may be compiled at least `count` times."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
