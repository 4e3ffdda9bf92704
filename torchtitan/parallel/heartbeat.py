"""Which ranks are alive, and where in the code: each rank reports once a second to the store of the process group.

When a rank dies or is stopped, the others see a broken connection or a collective that never ends, and neither names
the rank. Its missing heartbeat does, on every machine and with every backend.
"""

import functools
import os
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from torchtitan.launcher.monitor import Watcher, in_background, watch, with_timeout
from torchtitan.launcher.progress import COLLECTIVE, main_thread_location
from torchtitan.launcher.signals import Stop
from torchtitan.logging import logger

BEAT_INTERVAL = 1.0  # seconds between two beats
BEAT_PATIENCE = 3.0  # seconds within which a living rank beats, however busy
BEAT_SILENCE = 20.0  # seconds without a beat before a warning, even if nothing has failed
MOST_LATE = 8  # late ranks to list
GROUPS = 4  # locations to list


class Heartbeat:
    """The heartbeats of all ranks, as seen by one of them.

    Args:
        store: of the process group. The heartbeat opens a second connection to it, since a thread that waits for a key
            blocks all others on the same connection.
        stop: a stop request is forwarded through the store. Normally ranks agree to stop at a step boundary; this
            reaches those that get to none: a rank that is compiling must not wait for one that has given up.
    """

    # Ends of a rank that is not at fault: it lost another one, was stopped by a signal, or has finished.
    LOST, STOPPED, FINISHED = "lost contact", "stopped", "finished"

    def __init__(self, store: dist.Store, rank: int, world_size: int, stop: Stop | None = None) -> None:
        self.store = dist.PrefixStore("heartbeat", store.clone())  # type: ignore[attr-defined]  # in no stub
        self.rank = rank
        self.world_size = world_size
        self.stop = stop or Stop(rank)
        self.others = [other for other in range(world_size) if other != rank]
        self._heard = ""  # the last beat of the next rank
        self._ended = False

    def start(self, silence: float = BEAT_SILENCE) -> None:
        """From now on beats until its `end`, and warns if the next rank is silent."""
        self.store.set(f"beat/{self.rank}", "0")
        self.store.set(f"end/{self.rank}", "")
        self.store.set(f"process/{self.rank}", f"{os.getpid()} on {socket.gethostname()}")
        watch(self._beats(silence))

    def end(self, how: str) -> None:
        """Records how this rank ends, so that it does not look dead: one of the words above, or an error's name."""
        self._ended = True
        with_timeout(BEAT_PATIENCE, lambda: self.store.set(f"end/{self.rank}", how))

    def account(self) -> str:
        """One sentence on missing or late ranks. Takes PATIENCE if some are missing, a second if none is."""
        silent = with_timeout(2 * BEAT_PATIENCE, self._silent)
        if silent is None:
            return "The rendezvous store of the run does not respond: its machine is down or unreachable."
        if silent:
            do = "does" if len(silent) == 1 else "do"
            return f"{_ranks(silent)} {do} not respond: exited, stopped, or on a machine that is down."
        ends = with_timeout(BEAT_PATIENCE, lambda: self._read("end", self.others)) or {}
        if failed := self._failures(ends):
            named = "; ".join(f"Rank {other} failed with {how}" for other, how in failed.items())
            return f"{named}: see its own error message."
        if stopped := [other for other, how in ends.items() if how == self.STOPPED]:
            return f"{_ranks(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped by a signal."
        late = [other for other, how in ends.items() if not how][:MOST_LATE]
        beats = with_timeout(BEAT_PATIENCE, lambda: self._read("beat", late)) or {}
        if beats:
            return " ".join(f"Rank {other} is at {beat.partition(' ')[2]}." for other, beat in beats.items())
        return "All ranks respond, and all have failed: the network is broken, or the timeout is too short."

    def has_lost_a_rank(self) -> bool:
        """Whether another rank has failed, or is gone without a word. Takes as long as `account`."""
        ends = with_timeout(BEAT_PATIENCE, lambda: self._read("end", self.others)) or {}
        return bool(self._failures(ends) or with_timeout(2 * BEAT_PATIENCE, self._silent))

    def _failures(self, ends: dict[int, str]) -> dict[int, str]:
        return {rank: how for rank, how in ends.items() if how not in ("", self.LOST, self.STOPPED, self.FINISHED)}

    def locations(self) -> str:
        """Where the ranks were a second ago, first those that the others wait for, and how to find out more."""
        ranks_at: dict[str, list[int]] = {}
        for rank, beat in self._read("beat", range(self.world_size)).items():
            ranks_at.setdefault(beat.partition(" ")[2], []).append(rank)
        groups = sorted(ranks_at.items(), key=lambda group: (COLLECTIVE in group[0], len(group[1])))
        named = [f"{_ranks(ranks)}: at {where or 'an unknown location'}" for where, ranks in groups[:GROUPS]]
        if others := sum(len(ranks) for _, ranks in groups[GROUPS:]):
            named.append(f"{others} others: elsewhere")
        first = groups[0][1][0]
        return (
            f"{'; '.join(named)}. For the full stack of a rank: kill -USR2 PID on its machine, or py-spy dump --pid "
            f"PID (rank {first}: {self._read('process', [first])[first]})."
        )

    def _beats(self, silence: float) -> Watcher:
        last_sign, warned = time.monotonic(), False
        while not self._ended and (alive := (yield from in_background(self._beat))) is not None:  # the store is there
            if alive:
                last_sign, warned = time.monotonic(), False
            elif time.monotonic() - last_sign > silence and not warned:
                yield from in_background(functools.partial(self._warn, silence))
                warned = True
            yield BEAT_INTERVAL

    def _beat(self) -> bool:
        """Beats once. Whether the next rank has beaten since the last call, or has ended."""
        self.store.set(f"beat/{self.rank}", f"{time.monotonic()} {main_thread_location()}")
        self._forward_stop_request()
        neighbour = (self.rank + 1) % self.world_size
        heard, self._heard = self._heard, self._read("beat", [neighbour])[neighbour]
        return self._heard != heard or self._read("end", [neighbour])[neighbour] != ""

    def _warn(self, silence: float) -> None:
        for other in self._silent():
            logger.warning(f"no heartbeat from rank {other} for {silence:g} s")

    def _forward_stop_request(self) -> None:
        if self.store.check(["stop"]):
            self.stop.request(int(self.store.get("stop")))
        elif self.stop.requested:
            self.store.set("stop", str(self.stop.requested))

    def _silent(self) -> list[int]:
        before = self._read("beat", self.others)
        silent, deadline = self.others, time.monotonic() + BEAT_PATIENCE
        while silent and time.monotonic() < deadline:
            time.sleep(BEAT_INTERVAL / 2)
            beats, ends = self._read("beat", silent), self._read("end", silent)
            silent = [other for other in silent if beats[other] == before[other] and not ends[other]]
        return silent

    def _read(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        """One request for all ranks: after a failure, every rank asks for all others. '' for a rank not yet started."""
        keys = [f"{name}/{rank}" for rank in ranks]
        if self.store.check(keys):
            values = self.store.multi_get(keys)
        else:
            values = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        return {rank: value.decode() for rank, value in zip(ranks, values, strict=True)}


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
