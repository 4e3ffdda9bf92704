"""Reports what a run is doing when a step takes unexpectedly long."""

import functools
import os
import time
from collections.abc import Sequence

import torch.distributed as dist

from torchtitan.compat.distributed import default_store
from torchtitan.launcher.monitor import Watcher, in_background, with_timeout
from torchtitan.launcher.progress import COLLECTIVE, Progress, main_thread_location
from torchtitan.logging import logger
from torchtitan.parallel.heartbeat import PATIENCE, Heartbeat

STARTING = 10.0  # seconds between lines until the first step has finished
FIRST = 60.0  # seconds without a finished step until the first warning; each further one takes twice as long
MOST = 4  # locations that a warning names


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
    if dist.is_initialized() and dist.get_world_size() > 1:
        # On a separate connection, with a timeout: the store itself may not be answering.
        all_ranks = with_timeout(PATIENCE, _locations_of_all)
        return all_ranks or f"The store of the run does not respond; rank 0 is at {main_thread_location()}."
    location, pid = main_thread_location(), os.getpid()
    return f"The main thread is at {location}. For its full stack: kill -USR2 {pid}, or py-spy dump --pid {pid}."


def _locations_of_all() -> str:
    heart = Heartbeat(default_store(), dist.get_rank(), dist.get_world_size())
    ranks_at: dict[str, list[int]] = {}
    for rank, where in heart.places().items():
        ranks_at.setdefault(where, []).append(rank)
    # First the ranks that the others wait for.
    groups = sorted(ranks_at.items(), key=lambda group: (COLLECTIVE in group[0], len(group[1])))
    named = [f"{_ranks(ranks)}: at {where or 'an unknown location'}" for where, ranks in groups[:MOST]]
    if others := sum(len(ranks) for _, ranks in groups[MOST:]):
        named.append(f"{others} others: elsewhere")
    first = groups[0][1][0]
    return (
        f"{'; '.join(named)}. For the full stack of a rank: kill -USR2 PID on its machine, or py-spy dump --pid PID "
        f"(rank {first}: {heart.process(first)})."
    )


def _ranks(ranks: Sequence[int]) -> str:
    """'Rank 3', 'Ranks 0 to 2, 4'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
