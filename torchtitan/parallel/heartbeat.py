"""Which ranks are still there, and where: each says so once a second, in the store through which the run has met.

A rank that dies or is stopped leaves the others with a broken connection or a collective that does not end, and
neither tells them which rank it was. Its heartbeat does, on every machine and with every backend.
"""

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from torchtitan.logging import logger

INTERVAL = 1.0  # seconds between two beats
PATIENCE = 3.0  # seconds in which a living rank is heard, however busy
SILENCE = 20.0  # seconds without a beat after which the next rank says so, though nothing has failed yet
LOST = "lost contact"  # how a rank ends that has lost another
FINISHED = "finished"

Result = TypeVar("Result")


class Heartbeat:
    """The beats of all ranks, as one of them sees them.

    Args:
        store: of the process group. Another connection to it is opened, since a thread that waits for a key keeps all
            others from using its own.
        rank: this one.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store = dist.PrefixStore("heartbeat", store.clone())  # type: ignore[attr-defined]  # in no stub
        self.rank = rank
        self.world_size = world_size
        self.others = [other for other in range(world_size) if other != rank]

    def start(self, silence: float = SILENCE) -> None:
        """Beats, in a thread, until the process ends; watches the next rank, and says where it is silent."""
        stop = threading.Event()
        self.store.set(f"beat/{self.rank}", "0")
        threading.Thread(target=self._run, args=(stop, silence), daemon=True, name="heartbeat").start()

        def finish() -> None:
            stop.set()
            self.end(FINISHED)

        atexit.register(finish)

    def end(self, how: str) -> None:
        """Leaves word of how this rank ends, so that it is not taken for dead."""
        _within(PATIENCE, lambda: self.store.set(f"end/{self.rank}", how))

    def account(self) -> str:
        """A sentence on the ranks that are gone. Takes PATIENCE where some are, no time where none is."""
        silent = _within(2 * PATIENCE, self._silent)
        if silent is None:
            return "The machine of rank 0, which keeps the run's store, does not answer."
        if silent:
            return f"{_ranks(silent)} not answer: ended, stopped, or on a machine that is gone."
        ends = _within(PATIENCE, self._ends) or {}
        failed = [f"Rank {other} ended with {how}" for other, how in ends.items() if how not in (LOST, FINISHED)]
        if failed:
            return f"{'; '.join(failed)}: see its own message."
        late = [other for other in self.others if other not in ends]
        if late:
            places = _within(PATIENCE, lambda: [self._read(f"beat/{other}").partition(" ")[2] for other in late])
            return " ".join(f"Rank {other} is at {place}." for other, place in zip(late, places or [], strict=False))
        return "All ranks answer, and all have failed: the network is broken, or the time too short."

    def _run(self, stop: threading.Event, silence: float) -> None:
        neighbour = (self.rank + 1) % self.world_size
        count, heard, since, told = 0, "", time.monotonic(), False
        try:
            while not stop.wait(INTERVAL):
                count += 1
                self.store.set(f"beat/{self.rank}", f"{count} {_place()}")
                beat = self._read(f"beat/{neighbour}")
                if beat != heard or self._read(f"end/{neighbour}"):
                    heard, since, told = beat, time.monotonic(), False
                elif time.monotonic() - since > silence and not told:
                    told = True
                    for other in self._silent():
                        logger.warning(f"nothing has been heard from rank {other} for {silence:g} s")
        except dist.DistError:  # the store is gone, and the run will notice soon
            return

    def _silent(self) -> list[int]:
        before = {other: self._read(f"beat/{other}") for other in self.others}
        silent, deadline = list(self.others), time.monotonic() + PATIENCE
        while silent and time.monotonic() < deadline:
            time.sleep(INTERVAL / 4)
            silent = [other for other in silent if self._read(f"beat/{other}") == before[other]]
            ends = self._ends(silent)
            silent = [other for other in silent if other not in ends]
        return silent

    def _ends(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        ends = {other: self._read(f"end/{other}") for other in (self.others if ranks is None else ranks)}
        return {other: how for other, how in ends.items() if how}

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _place() -> str:
    """Where the main thread is: 'folder/file.py:line, in function'."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranks[0]} does" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} do"


def _within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call` returns; None where it fails or takes longer, as a store may whose machine is gone."""
    results: list[Result] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
