"""The next item is made in a thread while the current one is in use."""

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 0.05  # how soon a thread that waits for a free place notices that nobody wants more
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
        self._ready: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        thread = threading.Thread(target=run_ahead, args=(items, self._ready, self._closed), daemon=True)
        # The thread knows the queue and the event, not this object, so that dropping this object stops it. So does the
        # end of the process: a thread that is inside a tokenizer when the interpreter goes would abort it.
        self.close = weakref.finalize(self, stop, self._closed, thread)
        thread.start()

    def next(self) -> T:
        """The next item; what the iterator raised is raised here."""
        if self._failure is None and self._closed.is_set():
            raise RuntimeError("The loader is closed.")
        if self._failure is None:
            start = time.perf_counter()
            item = self._ready.get()
            self.wait_seconds += time.perf_counter() - start
            if not isinstance(item, BaseException):
                return item
            self._failure = item
        raise self._failure


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
