"""Reports what a run is doing when a step takes unexpectedly long."""

import functools
import os
import time

from torchtitan.launcher.monitor import Watcher, in_background, with_timeout
from torchtitan.launcher.progress import Progress, main_thread_location
from torchtitan.logging import logger
from torchtitan.parallel.process_group import heartbeat
from torchtitan.registry import load

STARTING = 10.0  # seconds between lines until the first step has finished
FIRST = 60.0  # seconds without a finished step until the first warning; each further one takes twice as long


def watch_progress(progress: Progress, rank: int) -> Watcher:
    """Watches a run. Rank 0 reports for all ranks, whose locations it reads from the store. A step is unexpectedly long
    if it takes over FIRST seconds and over twice as long as any before it, including saves and validation. What comes
    before the first step, and that step, which compiles, are reported in any case."""
    if rank > 0:
        return
    ended, due, starting = progress.ended, FIRST, STARTING
    while True:
        yield min(1.0, FIRST / 4, STARTING / 4)
        if progress.ended != ended:
            ended = progress.ended
            due = max(FIRST, 2 * progress.longest_interval) if progress.steps > 1 else FIRST
        elif (elapsed := time.monotonic() - ended) > due:
            yield from in_background(functools.partial(_warn, elapsed))
            due = 2 * elapsed
        elif progress.steps == 0 and elapsed > starting:
            phase = "starting" if progress.began is None else "the first step"
            message = f"{phase}: {elapsed:.0f} s so far; at {main_thread_location()}"
            yield from in_background(functools.partial(logger.info, message))
            starting = elapsed + STARTING


def _warn(elapsed: float) -> None:
    logger.warning(f"no step has finished for {elapsed:.0f} s. {_places()}")


def _places() -> str:
    """Where the ranks are, and how to find out more."""
    location, pid, heart = main_thread_location(), os.getpid(), heartbeat()
    if heart is not None:
        return with_timeout(load("torchtitan.parallel.heartbeat:BEAT_PATIENCE"), heart.locations) or (
            f"The store of the run does not respond; rank 0 is at {location}."
        )
    return f"The main thread is at {location}. For its full stack: kill -USR2 {pid}, or py-spy dump --pid {pid}."
