"""The thread that watches this process: its signals, and whatever must be checked at intervals.

The main thread cannot do it: it may be inside a long GEMM, a collective that waits for a lost rank, or an import that
would swallow a KeyboardInterrupt. A watcher is a generator: each turn checks something and yields the seconds until the
next one. All turns run in one thread, so none may wait: what may take long, such as a request to a store or output to a
paused terminal, runs `with_timeout` or `in_background`.
"""

import atexit
import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

OUTPUT = 1  # seconds for a message
TICK = 0.1  # seconds until a watcher looks again whether its call in the background has returned

Result = TypeVar("Result")
Watcher = Generator[float, None, Any]

_due: dict[Watcher, float] = {}  # time of the next turn
_turn = threading.RLock()  # held during a turn, which may add watchers
_takers: list[Callable[[int], object]] = []  # called with each signal


def watch(watcher: Watcher) -> None:
    """Gives the watcher its turns, the first one at once, until it ends."""
    with _turn, contextlib.suppress(BlockingIOError):  # many signals have come, and wake it up
        _due[watcher] = 0.0
        os.write(_start(), b"\0")


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Gives the watcher its turns within the context; then closes it."""
    watch(watcher)
    try:
        yield
    finally:
        _close([watcher])


def on_signal(take: Callable[[int], object]) -> None:
    """Calls `take` with each signal that has a Python handler, even while no handler can run. For the main thread."""
    _takers.append(take)
    signal.set_wakeup_fd(_start(), warn_on_full_buffer=False)  # written in C


def with_timeout(seconds: float, call: Callable[[], Result]) -> Result | None:
    """Result of `call`; None if it fails or takes longer, such as output to a paused terminal, which is then lost, or a
    request to a store whose machine is gone."""
    thread, results = _call(call)
    thread.join(seconds)
    return results[0] if results else None


def in_background(call: Callable[[], Result]) -> Generator[float, None, Result | None]:
    """For a watcher: `yield from` it. Result of `call`, which may take as long as it likes; None if it fails."""
    thread, results = _call(call)
    try:
        while thread.is_alive():
            yield TICK
    finally:
        thread.join(OUTPUT)  # if closed: a thread that is in C++ when Python ends aborts the process
    return results[0] if results else None


def _call(call: Callable[[], Result]) -> tuple[threading.Thread, list[Result]]:
    results: list[Result] = []

    def run() -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: torch's DistError
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


@functools.cache
def _start() -> int:
    """Starts the thread. Returns the end of a pipe that wakes it up: by the number of a signal, or 0."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    threading.Thread(target=_run, args=(read_end,), daemon=True, name="monitor").start()
    atexit.register(_close, _due)
    return write_end


def _close(watchers: Iterable[Watcher]) -> None:
    with _turn:
        for watcher in list(watchers):
            _due.pop(watcher, None)
            watcher.close()


def _run(read_end: int) -> None:
    ready = select.poll()
    ready.register(read_end, select.POLLIN)
    while True:
        with _turn:
            for watcher, due in list(_due.items()):
                if due <= time.monotonic():
                    _give_turn(watcher)
            next_due = min(_due.values(), default=None)
        if ready.poll(None if next_due is None else max(0.0, 1000 * (next_due - time.monotonic()))):
            for number in filter(None, os.read(read_end, 64)):
                for take in _takers:
                    take(number)


def _give_turn(watcher: Watcher) -> None:
    try:
        _due[watcher] = time.monotonic() + next(watcher)
    except StopIteration:
        del _due[watcher]
    except Exception:  # the other watchers go on
        del _due[watcher]
        error = traceback.format_exc()
        with_timeout(OUTPUT, lambda: print(error, file=sys.stderr))
