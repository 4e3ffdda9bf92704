"""Python's garbage collector at the same steps on every rank, so that no rank waits for another's collection."""

import contextlib
import gc
from collections.abc import Callable, Iterator

from torchtitan.logging import logger


@contextlib.contextmanager
def garbage_collection(freq: int, debug: bool) -> Iterator[Callable[[int], None]]:
    """Turns automatic collection off. Yields what is to be called in each step, with its number.

    Args:
        freq: steps from one collection to the next.
        debug: collect everything in each step, and log what was found.
    """

    def collect(step: int) -> None:
        if debug:
            found = gc.collect()
            logger.info(f"step {step}: garbage collection found {found} unreachable objects")
        elif step % freq == 0:
            gc.collect(1)

    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
