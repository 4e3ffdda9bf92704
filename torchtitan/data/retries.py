"""Reads data again after an error that is likely to pass, such as a lost connection."""

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torchtitan.logging import logger

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds

# What passes: status codes of HTTP, error numbers of the system, and, by package and name, the classes of libraries
# that need not be installed. A status decides before the others.
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
TRANSIENT_ERRNO = {
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EAGAIN, errno.EBUSY, errno.EINTR),
    *(errno.EIO, errno.ESTALE, errno.ENOBUFS, getattr(errno, "EREMOTEIO", errno.EIO)),
}
TRANSIENT_CLASSES = {
    *("builtins.ConnectionError", "builtins.TimeoutError", "asyncio.TimeoutError", "http.IncompleteRead"),
    *("requests.ConnectionError", "requests.Timeout", "requests.ChunkedEncodingError"),
    *("urllib3.ProtocolError", "urllib3.TimeoutError"),
    *("httpx.TransportError", "httpx2.TransportError", "httpcore.NetworkError", "httpcore.TimeoutException"),
    *("aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError"),
    *("botocore.ConnectionError", "botocore.HTTPClientError", "botocore.IncompleteReadError"),
    "google.TransportError",
}
STATUS_NAMES = ("status_code", "status", "code")
NAME_NOT_RESOLVED_NOW = -3  # EAI_AGAIN, an error number of `socket.gaierror`


@dataclass
class Retries:
    """Reads again, for some `seconds` from the first error until an item is read."""

    seconds: float
    end: float | None = None  # when to give up reading again

    @property
    def active(self) -> bool:
        """Whether an item is read again now."""
        end = self.end  # the loader's thread may set it to None
        return end is not None and time.monotonic() < end

    def over(self, start: Callable[[T | None], Iterator[T]]) -> Iterator[T]:
        """The items of `start(None)`; after a transient error, of `start(last)`, which go on after the last item.
        An error that is not transient, or comes when the time is over, is raised."""
        last: T | None = None
        items: Iterator[T] | None = None
        pause = FIRST_PAUSE
        while True:
            try:
                items = start(last) if items is None else items
                last = next(items)
            except StopIteration:
                return
            except Exception as error:
                now = time.monotonic()
                self.end = now + self.seconds if self.end is None else self.end
                if now >= self.end or not is_transient(error):
                    self.end = None
                    raise
                pause = min(pause, self.end - now)
                reason = str(error).rstrip(".")
                logger.warning(
                    f"{reason}. Reading again in {pause:.1f} s; training.retry_seconds leaves {self.end - now:.0f} s"
                )
                time.sleep(pause)
                items, pause = None, min(2 * pause, LONGEST_PAUSE)
            else:
                self.end, pause = None, FIRST_PAUSE
                yield last


def is_transient(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is likely to pass."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    status = next(filter(None, map(status_of, links)), None)
    return status in TRANSIENT_STATUS if status else any(map(is_listed, links))


def status_of(error: BaseException) -> int | None:
    """The status with which a server has refused, as libraries keep it."""
    answer: Any = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore's answers are dictionaries
        answer = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    known = (answer, *(getattr(holder, name, None) for holder in (answer, error) for name in STATUS_NAMES))
    return next((status for status in known if isinstance(status, int) and status >= 400), None)


def is_listed(error: BaseException) -> bool:
    names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    return bool(names & TRANSIENT_CLASSES) or number in TRANSIENT_ERRNO or number == NAME_NOT_RESOLVED_NOW
