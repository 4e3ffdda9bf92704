"""What a run reports about a step that takes unexpectedly long."""

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchtitan.launcher.monitor import watching
from torchtitan.launcher.progress import Progress, main_thread_location
from torchtitan.launcher.signals import Stop
from torchtitan.parallel.heartbeat import Heartbeat
from torchtitan.run import watchdog
from torchtitan.run.watchdog import watch_progress


def wait_for_lines(log: list[str], count: int) -> None:
    deadline = time.monotonic() + 20
    while len(log) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_lines_come_at_growing_intervals_and_after_long_steps_later(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "FIRST", 0.1)
    progress = Progress()
    with watching(watch_progress(progress, rank=1)):
        time.sleep(0.3)
    assert log == []  # one rank reports for all
    progress = Progress()
    with watching(watch_progress(progress, rank=0)):
        started = time.monotonic()
        wait_for_lines(log, 3)
        assert time.monotonic() - started > 0.4
        for _ in range(2):
            progress.begins()
            progress.ends()
        progress.ended -= 0.3
        progress.ends()  # a step of 0.3 s, so that only one of 0.6 s is unexpected
        del log[:]
        time.sleep(0.45)
        assert log == []
        wait_for_lines(log, 1)
    (line,) = log
    assert "WARNING no step has finished for 1 s. The main thread is at" in line
    assert "unit/test_watchdog.py" in line and "in wait_for_lines (`time.sleep(0.01)`)" in line
    assert "kill -USR2" in line and "py-spy dump --pid" in line


def test_a_start_says_every_few_seconds_what_it_does(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STARTING", 0.1)
    progress = Progress()
    with watching(watch_progress(progress, rank=0)):
        wait_for_lines(log, 1)
        progress.begins()
        wait_for_lines(log, 2)
        progress.ends()
        time.sleep(0.2)
    assert log[0].startswith("INFO starting: 0 s so far; at unit/test_watchdog.py")
    assert log[-1].startswith("INFO the first step: ") and len(log) < 5


def test_a_place_names_the_statement_and_what_it_has_called() -> None:
    places: list[str] = []
    timer = threading.Timer(0.1, lambda: places.append(main_thread_location()))
    timer.start()
    timer.join()
    assert "unit/test_watchdog.py" in places[0]
    assert "called (`timer.join()`), now in python" in places[0]


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
