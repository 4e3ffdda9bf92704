"""Watchers share one thread, and neither a fault nor a wait of one keeps the others."""

import threading
import time
from collections.abc import Callable

import pytest

from torchtitan.launcher.monitor import Watcher, in_background, watch, watching


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counting(turns: list[str]) -> Watcher:
    try:
        while True:
            turns.append(threading.current_thread().name)
            yield 0.01
    finally:
        turns.append("closed")


def test_all_turns_are_in_one_thread_until_the_watcher_is_closed() -> None:
    first, second = list[str](), list[str]()
    with watching(counting(first)), watching(counting(second)):
        wait_until(lambda: min(len(first), len(second)) > 2)
    assert first[-1] == second[-1] == "closed"
    assert {*first[:-1], *second[:-1]} == {"monitor"}


def test_a_fault_of_one_watcher_is_printed_and_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def faulty() -> Watcher:
        yield 0.01
        raise KeyError("a fault")

    turns = list[str]()
    with watching(counting(turns)):
        watch(faulty())
        wait_until(lambda: "KeyError: 'a fault'" in capsys.readouterr().err)
        before = len(turns)
        wait_until(lambda: len(turns) > before + 2)


def test_what_waits_in_the_background_keeps_no_other_watcher() -> None:
    answer, results, turns = threading.Event(), list[bool | None](), list[str]()

    def waiting() -> Watcher:
        results.append((yield from in_background(answer.wait)))
        results.append((yield from in_background(lambda: int("no number") > 0)))

    with watching(counting(turns)):
        watch(waiting())
        wait_until(lambda: len(turns) > 5)
        assert results == []
        answer.set()
        wait_until(lambda: results == [True, None])
