"""Errors that are likely to pass, such as a lost connection."""

import errno
from typing import Any

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
