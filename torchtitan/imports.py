"""Importing torch, and all that comes with it, in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Without the garbage collector, which would look again and again, now and later, through what modules keep."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
