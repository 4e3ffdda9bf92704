"""Paths and files that a user names: what a path leads to, and no waiting for what is not a file."""

import argparse
import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, cast

from upath import UPath

from torchtitan.errors import DataError, install
from torchtitan.logging import Waiting

URI = re.compile(r"[A-Za-z][\w+.-]*:/")  # one slash too: pathlib joins two
OF_THIS_MACHINE = re.compile(r"(?:file|local):(?://)?(?=/)|file://(?=.)", re.IGNORECASE)
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # scheme -> extra of pyproject.toml
PIECE = 4 << 20  # bytes per read
BLOCK = 16 << 20  # bytes of a request, if a file in an object store is read as a whole
TRIES = 2  # s3fs tries this often, with 5 requests each, which wait up to 15 s; its own 5 would take over 6 minutes
NOT_FILES = {
    stat.S_IFIFO: "it is a named pipe, not a file",
    stat.S_IFSOCK: "it is a socket, not a file",
    stat.S_IFCHR: "it is a device, not a file",
    stat.S_IFBLK: "it is a device, not a file",
}


class PathError(DataError, ValueError, argparse.ArgumentTypeError):
    """A path that leads nowhere on this machine. pydantic and argparse take it for a wrong value of their key."""


class UriError(PathError):
    """A URI that is another name than it seems to be."""


def is_uri(path: str) -> bool:
    """Whether it names something in an object store, such as s3://bucket/run."""
    return URI.match(path) is not None


def expand(path: str) -> str:
    """A path that a user has written, with `~` replaced by the home folder. Raises a PathError for a URI, an unknown
    home folder, and a zero byte."""
    if is_uri(path):
        raise PathError(f"{path!r} is no path on this machine; mount or copy what is stored elsewhere.")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise PathError(f"{path!r}: there is no such home folder; write ./{path} for a file of that name.")
    if "\0" in path:
        raise PathError(f"{path!r} contains a zero byte, which no path can.")
    return expanded


def local_path(path: str) -> Path:
    """`expand` as a Path: the `type` of an argument."""
    if not path:  # such as an unset shell variable
        raise PathError("a path must not be empty.")
    return Path(expand(path))


def expand_any(path: str) -> str:
    """`expand`, for keys that also take a URI."""
    path = OF_THIS_MACHINE.sub("", path, count=1)
    return plain_uri(path) if is_uri(path) else expand(path)


def plain_uri(uri: str) -> str:
    """The URI. Raises a UriError if it has no bucket, or a part of it is empty, `.` or `..`, or has blanks around it:
    to an object store that is a name like any other, to whatever joins or lists paths it is not."""
    scheme, rest = uri.split(":", 1)
    parts = rest.removeprefix("/").removeprefix("/").rstrip("/").split("/")
    clean = [part.strip() for part in parts if part.strip() not in ("", ".", "..")]
    if clean != parts:
        instead = f"; if you mean {scheme}://{'/'.join(clean)}, write that" if clean and ".." not in parts else ""
        raise UriError(f"{uri!r} cannot be used: a part of it is empty, . or .., or has blanks around it{instead}.")
    return uri


def expand_data(path: str) -> str:
    """A path, a URI, or whatever a user's own data set takes, with `~` replaced and no `file://`."""
    return os.path.expanduser(OF_THIS_MACHINE.sub("", path, count=1))


def any_path(path: str) -> Path:
    """A path on this machine, or a `UPath`, which has the methods of a Path, for a URI. Raises a PathError if nothing
    here can read such URIs, or `expand` refuses the path."""
    path = OF_THIS_MACHINE.sub("", path, count=1)
    if not is_uri(path):
        return local_path(path)
    scheme, rest = path.split(":", 1)
    if scheme.lower() in ("http", "https"):  # fsspec would read a file of any size for the links in it
        raise PathError(f"{path!r} cannot be read: a web server does not list files; download it first.")
    plain_uri(path)
    try:
        place = UPath(f"{scheme.lower()}:{rest}", use_listings_cache=False)  # others write there, too
        store = place.fs  # imports what can read it
    except ImportError as error:
        extra = install(EXTRAS[scheme.lower()]) if scheme.lower() in EXTRAS else str(error)
        raise PathError(f"{path!r} cannot be read: a package is missing; {extra.rstrip('.')}.") from None
    except Exception as error:  # each library has its own
        raise PathError(f"{path!r} cannot be read: {as_os_error(error, path).strerror}.") from error
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the tracebacks of what it raises
    if hasattr(store, "retries"):
        store.retries = TRIES
    return cast(Path, place)


# Errors of the object stores' libraries: names of exceptions, and codes in answers; the errno; what to tell a user.
FAULTS = (
    ("NoSuchBucket BucketNotFoundError", errno.ENOENT, "there is no such bucket: correct its name, or create it"),
    ("RepositoryNotFoundError", errno.ENOENT, "there is no such repository, or HF_TOKEN does not give access to it"),
    ("GatedRepoError", errno.EACCES, "the repository is gated: ask for access to it on the Hub, and set HF_TOKEN"),
    ("RequestTimeTooSkewed", errno.EACCES, "the clock of this machine is off: set it, for example by NTP"),
    ("ExpiredToken", errno.EACCES, "the credentials have expired: get new ones"),
    ("InvalidAccessKeyId", errno.EACCES, "the store does not know the access key: correct AWS_ACCESS_KEY_ID"),
    (
        "SignatureDoesNotMatch",
        errno.EACCES,
        "the store refuses the signature: correct AWS_SECRET_ACCESS_KEY, or AWS_DEFAULT_REGION",
    ),
    (
        "AccessDenied AllAccessDisabled Forbidden 403 401",
        errno.EACCES,
        "access is refused: check the credentials and what they may do there, and that the clock of this machine is "
        "right",
    ),
    (
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound UnauthorizedSSOTokenError "
        "DefaultCredentialsError RefreshError",
        errno.EACCES,
        "there are no credentials for it: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE for s3, "
        "GOOGLE_APPLICATION_CREDENTIALS for gs, HF_TOKEN for hf",
    ),
    (
        "EndpointConnectionError ConnectTimeoutError ReadTimeoutError ConnectionClosedError ClientConnectorError "
        "ClientConnectorDNSError ConnectError ConnectTimeout ReadTimeout FSTimeoutError OfflineModeIsEnabled",
        errno.ECONNREFUSED,
        "the object store does not answer: check the network, and the endpoint (AWS_ENDPOINT_URL, "
        "STORAGE_EMULATOR_HOST or HF_ENDPOINT, if set)",
    ),
)
REASONS = {name: (number, reason) for names, number, reason in FAULTS for name in names.split()}
CODES = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ETIMEDOUT)
ERRNO_OF = {**{type(OSError(code, "")): code for code in CODES}, ValueError: errno.EINVAL}  # Python's own classes
LIBRARIES = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx", "huggingface_hub"}
LIBRARIES |= {"asyncio", "httpcore2", "httpx2", "requests", "s3fs", "urllib3"}


@contextmanager
def store_errors(path: object) -> Iterator[None]:
    """Context in which a fault of an object store becomes an OSError (FileNotFoundError or PermissionError where it is
    one) with `strerror`, a sentence with the remedy, and `filename`; its cause is the library's own error. Says every
    10 seconds that it waits. Does nothing for a path on this machine."""
    if not is_uri(str(path)):
        yield
        return
    try:
        with Waiting(f"{path}: waiting for the object store"):
            yield
    except Exception as error:
        library = type(error).__module__.split(".")[0] in LIBRARIES
        if not (library or isinstance(error, OSError | NotImplementedError) or type(error) is ValueError):
            raise
        raise as_os_error(error, str(path)) from error


def as_os_error(error: Exception, path: str) -> OSError:
    """The error of an object store's library as `store_errors` raises it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return error
    links: list[BaseException] = [error]
    while (cause := links[-1].__cause__ or links[-1].__context__) and len(links) < 10:
        links.append(cause)
    for link in links:
        answer = getattr(link, "response", None)
        codes = [answer.get("Error", {}).get("Code")] if isinstance(answer, dict) else [getattr(link, "code", None)]
        for name in (*codes, *(base.__name__ for base in type(link).__mro__)):
            if reason := REASONS.get(str(name)):
                return OSError(*reason, path)
    number = getattr(error, "errno", None)
    number = number or next((number for type_, number in ERRNO_OF.items() if isinstance(error, type_)), errno.EIO)
    if number == errno.ENOENT:
        return OSError(number, "there is no such file or folder in the object store", path)
    text = getattr(error, "strerror", None) or str(error).split("\n", 1)[0]
    return OSError(number, text.rstrip(".") or type(error).__name__, path)


def regular_file(path: Path) -> Path:
    """The path itself, for a file or folder, here or in an object store. Raises an OSError for all else: opening a
    named pipe would wait forever, and a device may have no end."""
    if not is_uri(str(path)) and (reason := NOT_FILES.get(stat.S_IFMT(path.stat().st_mode))):
        raise OSError(errno.EINVAL, reason, str(path))
    return path


def text_of(path: Path, key: str) -> str:
    """The text of a file that a key names. Raises a DataError with the key if it cannot be read, or is not UTF-8."""
    try:
        return regular_file(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None


def is_remote(path: Path) -> bool:
    """Whether `any_path` has made it of a URI."""
    return isinstance(path, UPath)


def joined(folder: Path, path: str) -> Path:
    """`path` in a folder; or itself, if it is absolute or a URI."""
    return any_path(path) if is_uri(path) else folder / path


@contextmanager
def open_bytes(path: Path) -> Iterator[FileIO]:
    """A file to be read in large pieces. What goes wrong is an OSError (`store_errors`)."""
    options: dict[str, Any] = {"block_size": BLOCK} if is_remote(path) else {"buffering": 0}
    with store_errors(path), path.open("rb", **options) as file:
        yield cast(FileIO, file)


def sha256_of(path: Path, read: Callable[[int], object] = int) -> str:
    """SHA-256 of a file's content, hexadecimal. `read` is told the bytes of each piece that was read."""
    digest, buffer = hashlib.sha256(), bytearray(PIECE)
    with open_bytes(path) as file, memoryview(buffer) as view:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            read(size)
    return digest.hexdigest()
