"""Importing torch, and all that comes with it, in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Without the garbage collector, which would look again and again, now and later, through what modules keep.

    The first step of the debug model comes a tenth earlier.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
