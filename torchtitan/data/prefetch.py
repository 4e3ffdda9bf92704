"""A thread prepares the next item while the current one is in use."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar, cast

from torchtitan.logging import Waiting, logger

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 0.05  # how soon a waiting reader or writer notices that it is cancelled or closed
SECONDS_TO_STOP = 2.0


class Prefetcher(Generic[T]):
    """Prefetches an endless iterator, of anything but None, in a daemon thread, which queues up to `depth` items.

    Attributes:
        wait_seconds: total time that the reader has waited.
        close: stops the thread. A thread blocked on the network is abandoned, and ends once it is unblocked.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.wait_seconds = 0.0
        self._item: T | BaseException | None = None  # taken from the queue by `wait`; a failure stays
        self._ready: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        thread = threading.Thread(target=run_ahead, args=(items, self._ready, self._closed), daemon=True)
        # The thread references the queue and the event but not this object, so deleting this object stops the thread.
        # So does the end of the process: a thread still inside a tokenizer at interpreter exit would abort it.
        self.close = weakref.finalize(self, stop, self._closed, thread)
        thread.start()

    def wait(self, cancelled: Callable[[], object] = lambda: False) -> bool:
        """Waits for the next item until `cancelled()`: whether it is available. Re-raises the iterator's exception."""
        if self._closed.is_set() and not isinstance(self._item, BaseException):
            raise RuntimeError("The loader is closed.")
        start = said = time.perf_counter()
        while self._item is None and not cancelled():
            with suppress(queue.Empty):
                self._item = self._ready.get(timeout=SECONDS_BETWEEN_LOOKS)
            if (now := time.perf_counter()) - said > Waiting.INTERVAL:
                said = now
                logger.info(f"waiting for the next documents: {now - start:.0f} s so far")
        self.wait_seconds += time.perf_counter() - start
        if isinstance(self._item, BaseException):
            raise self._item
        return self._item is not None

    def next(self) -> T:
        """The next item. Re-raises the iterator's exception."""
        self.wait()
        item, self._item = self._item, None
        return cast(T, item)


def stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(SECONDS_TO_STOP)


def run_ahead(items: Iterator[T], ready: "queue.Queue[T | BaseException]", closed: threading.Event) -> None:
    def queued(item: T | BaseException) -> bool:
        """Whether it was queued before the reader closed."""
        while not closed.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=SECONDS_BETWEEN_LOOKS)
                return True
        return False

    try:
        for item in items:
            if not queued(item):
                return
    except BaseException as error:  # any exception belongs to the reader
        queued(error)
