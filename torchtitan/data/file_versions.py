"""Versions of data files, and how they are opened."""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from upath import UPath

from torchtitan.errors import DataError
from torchtitan.files import is_remote, store_errors
from torchtitan.logging import logger
from torchtitan.registry import deferred

_store_file: Callable[..., io.RawIOBase] = deferred("torchtitan.data.blocks:StoreFile")

SAMPLE = 1 << 16  # bytes of the beginning, the middle and the end of a file
MOST_SAMPLED = 10_000  # files; of more, evenly spread ones
# What tells versions of an object apart, by store; the first that its listing has.
VERSION = ("ETag", "etag", "generation", "blob_id", "xet_hash", "mtime", "LastModified", "last_modified", "created")


@cache
def say_once(message: str) -> None:
    logger.info(message)


class Stamp(NamedTuple):
    """Identifies a version of a file, to detect changes. Excludes the inode: some network file systems change it."""

    size: int
    changed: int  # ns; in an object store, a hash of what the store tells versions apart by

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """In an object store, as last listed: a request for each of many files would take minutes."""
        return LISTED.get(str(path)) or cls.now(path)

    @classmethod
    def now(cls, path: Path, file: BinaryIO | None = None) -> "Stamp":
        """Of the path, or of a file of this machine that was opened."""
        if not is_remote(path):
            status = path.stat() if file is None else os.fstat(file.fileno())
            return cls(status.st_size, status.st_mtime_ns)
        store, inside = file_system_of(path)
        with store_errors(path):
            store.invalidate_cache(inside)
            return cls.of_info(store.info(inside))

    @classmethod
    def of_info(cls, info: dict[str, Any]) -> "Stamp":
        """From what fsspec tells about an object."""
        version = next((info[key] for key in VERSION if info.get(key)), "")
        text = str(getattr(version, "timestamp", lambda: version)())
        return cls(info["size"] or 0, int(hashlib.sha256(text.encode()).hexdigest()[:15], 16))

    def check(self, path: Path, file: BinaryIO | None = None) -> None:
        """Raises a DataError if the file, opened or not, has changed, because offsets into it would be wrong."""
        if (now := Stamp.now(path, file)) != self:
            raise DataError(
                f"{path} was changed while the run is reading it (it had {self.size:,} bytes, now {now.size:,}); "
                "restore it, and run the same command again."
            )

    def open(self, path: Path, buffer: int = io.DEFAULT_BUFFER_SIZE) -> BinaryIO:
        """The file; raises a DataError if it has changed. From an object store, `buffer` bytes are fetched together."""
        if is_remote(path):
            return cast(BinaryIO, io.BufferedReader(_store_file(path, self), buffer))
        file = path.open("rb")
        try:
            self.check(path, file)
        except DataError:
            file.close()
            raise
        return file


def sample_of(path: Path) -> str:
    """A hash of parts of a file's content: another file may have its size and time. "" in an object store, whose stamps
    identify the content. Raises an OSError if it cannot be read."""
    if is_remote(path):
        return ""
    content = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in (0, size // 2, max(0, size - SAMPLE)):
            file.seek(start)
            content.update(file.read(SAMPLE))
    return content.hexdigest()


def samples_of(paths: Sequence[Path], most: int = MOST_SAMPLED) -> list[str]:
    """`sample_of` for each of `most` of these files, which are evenly spread; "" for the others."""
    every, samples = -(-len(paths) // most) or 1, [""] * len(paths)
    with ThreadPoolExecutor(16) as threads:
        samples[::every] = threads.map(sample_of, paths[::every])
    return samples


@dataclass
class BlockCache:
    """What `blocks` keeps in the cache folder, which all processes of a machine and user share. The least recently used
    are removed beyond a bound. Without a folder for them nothing is kept."""

    most: int = 20_000_000_000  # bytes, as training.cache_gb; half of what is free is left free, too
    unchecked: int = most  # bytes written by this process since it looked at the size of all


KEPT = BlockCache()
LISTED: dict[str, Stamp] = {}  # URI -> stamp


def file_system_of(path: Path) -> tuple[Any, str]:
    """The file system of a path in an object store, and the path there."""
    place = cast(UPath, path)
    return place.fs, str(place.path).rstrip("/")


def head_of(path: Path, size: int) -> bytes:
    """The first bytes of a file; of one in an object store, not a whole block."""
    if is_remote(path):
        store, inside = file_system_of(path)
        with store_errors(path):
            return cast(bytes, store.cat_file(inside, start=0, end=size))
    with path.open("rb") as file:
        return file.read(size)
