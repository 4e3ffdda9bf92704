"""Paths and files that a user names: what a path leads to, and no waiting for what is not a file."""

import argparse
import errno
import os
import re
import stat
from pathlib import Path
from typing import cast

from upath import UPath

from torchtitan.errors import DataError

__all__ = ["PathError", "any_path", "expand", "expand_any", "is_uri", "local_path", "regular_file"]

URI = re.compile(r"[A-Za-z][\w+.-]*:/")  # one slash too: pathlib joins two
NOT_FILES = {
    stat.S_IFIFO: "it is a named pipe, not a file",
    stat.S_IFSOCK: "it is a socket, not a file",
    stat.S_IFCHR: "it is a device, not a file",
    stat.S_IFBLK: "it is a device, not a file",
}


class PathError(DataError, ValueError, argparse.ArgumentTypeError):
    """A path that leads nowhere on this machine. pydantic and argparse take it for a wrong value of their key."""


def is_uri(path: str) -> bool:
    """Whether it names something in an object store, such as s3://bucket/run."""
    return URI.match(path) is not None


def expand(path: str) -> str:
    """A path that a user has written, with `~` replaced by the home folder.

    Raises:
        PathError: it is a URI, or of a user whose home folder is unknown, or contains a zero byte.
    """
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
    path = path.removeprefix("file://")
    return path if is_uri(path) else expand(path)


def any_path(path: str) -> Path:
    """A path on this machine, or a `UPath`, which has the methods of a Path, for a URI.

    Raises:
        PathError: nothing here can read such URIs, or `expand` refuses the path.
    """
    path = path.removeprefix("file://")
    if not is_uri(path):
        return local_path(path)
    try:
        place = UPath(path)
        _ = place.fs  # imports what can read it
    except (ImportError, ValueError) as error:
        raise PathError(f"{path!r} cannot be read: {str(error).rstrip('.')}.") from None
    return cast(Path, place)


def regular_file(path: Path) -> Path:
    """The path itself, for a file or folder. Opening a named pipe would wait forever, and a device may have no end.

    Raises:
        OSError: nothing is there, or neither of them.
    """
    if reason := NOT_FILES.get(stat.S_IFMT(path.stat().st_mode)):
        raise OSError(errno.EINVAL, reason, str(path))
    return path
