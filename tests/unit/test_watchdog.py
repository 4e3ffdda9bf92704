"""What a run reports about a step that takes unexpectedly long."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from clock import Clock

from torchtitan.launcher import progress as progress_module
from torchtitan.launcher.monitor import watching
from torchtitan.launcher.progress import Progress, main_thread_location
from torchtitan.launcher.signals import Stop
from torchtitan.parallel.heartbeat import Heartbeat
from torchtitan.run import watchdog
from torchtitan.run.watchdog import watch_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (progress_module, watchdog):
        monkeypatch.setattr(module, "time", clock)
    return clock


def at(seconds: float, clock: Clock) -> None:
    """Lets it be so late, until a watch has seen it twice: what it had to say then is said."""
    clock.now = seconds
    looks, deadline = clock.looks, time.monotonic() + 120
    while clock.looks < looks + 3:  # one look may have begun before
        assert time.monotonic() < deadline, "nobody watches"
        time.sleep(0.01)


def test_lines_come_at_growing_intervals_and_after_long_steps_later(
    log: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FIRST", 0.1)
    assert list(watch_progress(Progress(), rank=1)) == []  # one rank reports for all
    progress = Progress()
    with watching(watch_progress(progress, rank=0)):
        for seconds, lines in ((0.09, 0), (0.12, 1), (0.23, 1), (0.25, 2), (0.49, 2), (0.52, 3)):
            at(seconds, clock)
            assert len(log) == lines, seconds
        for _ in range(2):
            progress.begins()
            progress.ends()
        clock.now = 0.82
        progress.ends()  # a step of 0.3 s, so that only one of 0.6 s is unexpected
        del log[:]
        at(1.41, clock)
        assert log == []
        at(1.43, clock)
    (line,) = log
    assert "WARNING no step has finished for 1 s. The main thread is at" in line
    assert re.search(r"unit/test_watchdog\.py:\d+, in at \(`.+`\)", line)
    assert "kill -USR2" in line and "py-spy dump --pid" in line


def test_a_start_says_every_few_seconds_what_it_does(
    log: list[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "STARTING", 0.1)
    progress = Progress()
    with watching(watch_progress(progress, rank=0)):
        for seconds, lines in ((0.09, 0), (0.12, 1), (0.2, 1)):
            at(seconds, clock)
            assert len(log) == lines, seconds
        progress.begins()
        at(0.3, clock)
        assert len(log) == 2
        progress.ends()
        at(1.0, clock)
    assert log[0].startswith("INFO starting: 0 s so far; at unit/test_watchdog.py")
    assert log[1].startswith("INFO the first step: ") and len(log) == 2


def test_a_place_names_the_statement_and_what_it_has_called() -> None:
    places: list[str] = []

    def look() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:  # until the main thread waits for this one
            places.append(main_thread_location())
            if "called (`thread.join()`), now in python" in places[-1]:
                return
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert "unit/test_watchdog.py" in places[-1]
    assert "called (`thread.join()`), now in python" in places[-1]


@pytest.fixture
def hearts() -> Iterator[list[Heartbeat]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    stops = [Stop(rank) for rank in range(6)]
    for stop in stops:
        stop.agreed_on = signal.SIGUSR1  # otherwise this process would be terminated after the grace period
    yield [Heartbeat(store, rank, 6, stop) for rank, stop in enumerate(stops)]


def test_ranks_in_the_same_place_share_a_line(hearts: list[Heartbeat]) -> None:
    for heart in hearts:
        heart.store.set(f"beat/{heart.rank}", f"7 {'data.py:3, in next' if heart.rank == 4 else 'clip.py:9, in clip'}")
        heart.store.set(f"process/{heart.rank}", f"424{heart.rank} on node7")
    assert hearts[0].locations() == (
        "Rank 4: at data.py:3, in next; Ranks 0 to 3, 5: at clip.py:9, in clip. For the full stack of a rank: kill "
        "-USR2 PID on its machine, or py-spy dump --pid PID (rank 4: 4244 on node7)."
    )


def test_a_signal_to_one_rank_reaches_all_though_they_do_not_meet(hearts: list[Heartbeat]) -> None:
    hearts[3].stop.request(signal.SIGUSR1)
    hearts[3]._forward_stop_request()
    hearts[5]._forward_stop_request()
    assert [heart.stop.requested for heart in hearts] == [0, 0, 0, signal.SIGUSR1, 0, signal.SIGUSR1]
