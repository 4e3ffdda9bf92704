"""The next item is made in a thread while the current one is in use."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 0.05  # how soon who waits for a free place, or for an item, notices that nobody wants it
SECONDS_TO_STOP = 2.0


class Prefetcher(Generic[T]):
    """An endless iterator, run ahead of its reader in a daemon thread.

    Args:
        items: used in the thread only.
        depth: how many items may wait to be read.

    Attributes:
        wait_seconds: how long the reader has waited in all.
        close: call it to stop the thread. One that waits for the network is left behind, and ends when that is over.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.wait_seconds = 0.0
        self._failure: BaseException | None = None
        self._held: list[T] = []  # at most one: it was waited for, and is yet to be read
        self._ready: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        thread = threading.Thread(target=run_ahead, args=(items, self._ready, self._closed), daemon=True)
        # The thread knows the queue and the event, not this object, so that dropping this object stops it. So does the
        # end of the process: a thread that is inside a tokenizer when the interpreter goes would abort it.
        self.close = weakref.finalize(self, stop, self._closed, thread)
        thread.start()

    def wait(self, cancelled: Callable[[], object] = lambda: False) -> None:
        """Returns when the next item is there, or when `cancelled` says so; what the iterator raised is raised here."""
        if self._failure is None and self._closed.is_set():
            raise RuntimeError("The loader is closed.")
        start = time.perf_counter()
        while self._failure is None and not self._held and not cancelled():
            try:
                item = self._ready.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                self._failure = item
            else:
                self._held.append(item)
        self.wait_seconds += time.perf_counter() - start
        if self._failure is not None:
            raise self._failure

    def next(self) -> T:
        """The next item; what the iterator raised is raised here."""
        self.wait()
        return self._held.pop()


def stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(SECONDS_TO_STOP)


def run_ahead(items: Iterator[T], ready: "queue.Queue[T | BaseException]", closed: threading.Event) -> None:
    try:
        for item in items:
            if not put(item, ready, closed):
                return
    except BaseException as error:  # whatever it is, it belongs to the reader
        put(error, ready, closed)


def put(item: T, ready: "queue.Queue[T]", closed: threading.Event) -> bool:
    """Whether the item found a place before the reader was gone."""
    while not closed.is_set():
        try:
            ready.put(item, timeout=SECONDS_BETWEEN_LOOKS)
            return True
        except queue.Full:
            pass
    return False
