"""Runs Python's garbage collector at the same steps on every rank, so that no rank waits for another's collection."""

import contextlib
import gc
from collections.abc import Callable, Iterator

from torchtitan.logging import logger


@contextlib.contextmanager
def garbage_collection(freq: int, debug: bool) -> Iterator[Callable[[int], None]]:
    """Disables automatic collection. Yields a function to call with the number of each step: it collects every `freq`
    steps, or with `debug` in each, fully, and logs what it found."""

    def collect(step: int) -> None:
        if debug:
            unreachable = gc.collect()
            logger.info(f"step {step}: garbage collection found {unreachable} unreachable objects")
        elif step % freq == 0:
            gc.collect(1)

    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
