"""Versions of data files, and how they are read: those in object stores by blocks, which a bounded cache keeps."""

import errno
import hashlib
import io
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from upath import UPath

from torchtitan.cache import private_folder
from torchtitan.errors import DataError
from torchtitan.files import is_remote, store_errors
from torchtitan.logging import logger

BLOCK = 1 << 21  # bytes
AT_HAND = 64  # blocks of a process
AT_ONCE = 8  # blocks fetched by a process
AHEAD = 4 * BLOCK  # bytes that sequential reading fetches together
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
            return cast(BinaryIO, io.BufferedReader(StoreFile(path, self), buffer))
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
    every = -(-len(paths) // most) or 1
    with ThreadPoolExecutor(16) as threads:
        return [*threads.map(lambda number: "" if number % every else sample_of(paths[number]), range(len(paths)))]


LISTED: dict[str, Stamp] = {}  # URI -> stamp


def file_system_of(path: Path) -> tuple[Any, str]:
    """The file system of a path in an object store, and the path there."""
    place = cast(UPath, path)
    return place.fs, str(place.path).rstrip("/")


class StoreFile(io.RawIOBase):
    """A file in an object store, as a file object and as bytes: `len`, and slices that are buffers."""

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path, self.stamp, self.position = path, stamp, 0

    def __len__(self) -> int:
        return self.stamp.size

    def __bool__(self) -> bool:
        return True  # an empty file is a file, for a library that asks `if file`

    def __getitem__(self, range_: slice) -> "memoryview | bytes":
        start, stop, _ = range_.indices(len(self))
        numbers = range(start // BLOCK, -(-stop // BLOCK)) if start < stop else range(0)
        read = partial(block, self.path, self.stamp)
        if len(numbers) < 2:
            blocks = [read(number) for number in numbers]
        else:
            with ThreadPoolExecutor(AT_ONCE) as threads:  # not kept: a forked process would wait for its threads
                blocks = list(threads.map(read, numbers))
        pieces = [
            memoryview(content)[max(start - number * BLOCK, 0) : stop - number * BLOCK]
            for number, content in zip(numbers, blocks, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: len(self)}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        content = self[self.position : self.position + len(buffer)]
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)


@lru_cache(AT_HAND)
def block(path: Path, stamp: Stamp, number: int) -> "bytes | mmap.mmap":
    """A block of a file; from the cache folder, if it is there."""
    start, stop = number * BLOCK, min((number + 1) * BLOCK, stamp.size)
    store, inside = file_system_of(path)
    name = f"{hashlib.sha256(f'{path} {stamp}'.encode()).hexdigest()[:32]}-{number}"
    with suppress(OSError, ValueError, RuntimeError):
        return KEPT.mapped(name, stop - start)
    with store_errors(path):
        try:
            content: bytes = store.cat_file(inside, start=start, end=stop)
        finally:
            stamp.check(path)  # the range of another version is the wrong part, or does not exist
        if len(content) != stop - start:
            raise OSError(errno.EIO, f"the object store sent {len(content):,} of {stop - start:,} bytes", str(path))
    KEPT.keep(name, content)
    return content


@dataclass
class BlockCache:
    """Blocks in the cache folder, which all processes of a machine and user share. The least recently used are removed
    beyond a bound. Without a folder for them nothing is kept."""

    most: int = 20_000_000_000  # bytes, as training.cache_gb; half of what is free is left free, too
    unchecked: int = most  # bytes written by this process since it looked at the size of all

    def mapped(self, name: str, size: int) -> mmap.mmap:
        """Raises OSError, ValueError or RuntimeError if it is absent, or not whole."""
        place = private_folder("blocks") / name
        with place.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(content) != size:
            raise ValueError("its file was cut off")
        os.utime(place)  # it is used
        return content

    def keep(self, name: str, content: bytes) -> None:
        if not self.most:
            return
        try:
            folder = private_folder("blocks")
            new = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(folder / name)
            self.grown(len(content))
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
            with suppress(OSError, NameError):
                new.unlink()
            say_once(f"what is read from object stores is kept in memory only ({error})")

    def grown(self, size: int) -> None:
        self.unchecked += size
        if self.unchecked <= self.most // 20:
            return
        self.unchecked, files = 0, []
        try:
            folder = private_folder("blocks")
        except (OSError, RuntimeError):  # Nothing is kept.
            return
        for file in folder.rglob("*"):
            with suppress(FileNotFoundError):  # another process has removed it
                status = file.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, file))
        total = sum(size for _, size, _ in files)
        most = min(self.most, (total + shutil.disk_usage(folder).free) // 2)
        for _, size, file in sorted(files) if total > most else ():
            if total > most * 0.9:
                file.unlink(missing_ok=True)
                total -= size


KEPT = BlockCache()


def head_of(path: Path, size: int) -> bytes:
    """The first bytes of a file; of one in an object store, not a whole block."""
    if is_remote(path):
        store, inside = file_system_of(path)
        with store_errors(path):
            return cast(bytes, store.cat_file(inside, start=0, end=size))
    with path.open("rb") as file:
        return file.read(size)
