"""Files in object stores: read by blocks, which a bounded cache keeps, or copied, where a library maps files."""

import atexit
import errno
import hashlib
import io
import mmap
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.cache import LOOK_SECONDS, private_folder, write_once
from torchtitan.data.sources import KEPT, Stamp, digest, file_system_of, say_once
from torchtitan.files import store_errors
from torchtitan.logging import Waiting

BLOCK = 1 << 21  # bytes
AT_HAND = 64  # blocks of a process
AT_ONCE = 8  # blocks fetched by a process
AHEAD = 4 * BLOCK  # bytes that sequential reading fetches together


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
        return mapped(name, stop - start)
    with store_errors(path):
        try:
            content: bytes = store.cat_file(inside, start=start, end=stop)
        finally:
            stamp.check(path)  # the range of another version is the wrong part, or does not exist
        if len(content) != stop - start:
            raise OSError(errno.EIO, f"the object store sent {len(content):,} of {stop - start:,} bytes", str(path))
    keep(name, content)
    return content


def mapped(name: str, size: int) -> mmap.mmap:
    """Raises OSError, ValueError or RuntimeError if it is absent, or not whole."""
    place = private_folder("blocks") / name
    with place.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(content) != size:
        raise ValueError("its file was cut off")
    os.utime(place)  # it is used
    return content


def keep(name: str, content: bytes) -> None:
    if not KEPT.most:
        return
    try:
        folder = private_folder("blocks")
        new = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / name)
        grown(len(content))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        with suppress(OSError, NameError):
            new.unlink()
        say_once(f"what is read from object stores is kept in memory only ({error})")


def grown(size: int) -> None:
    KEPT.unchecked += size
    if KEPT.unchecked <= KEPT.most // 20:
        return
    KEPT.unchecked, files = 0, []
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
    most = min(KEPT.most, (total + shutil.disk_usage(folder).free) // 2)
    for _, size, file in sorted(files) if total > most else ():
        if total > most * 0.9:
            file.unlink(missing_ok=True)
            total -= size


def copied(root: Path, names: Sequence[str]) -> Path:
    """A folder with files of a folder in an object store, in this version; of the same name, because ids contain it.
    The processes of a machine make it once, or, without a cache folder, each for itself. Raises a DataError if a file
    changes while it is copied."""
    versions = [(name, Stamp.of(root / name)) for name in names]
    try:
        folder = private_folder("blocks")
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        folder = Path(tempfile.mkdtemp(prefix="torchtitan-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder = folder / digest([str(root), versions]) / root.name

    def fetch(source: Path, stamp: Stamp, file: BinaryIO) -> None:
        store, inside = file_system_of(source)
        with store_errors(source):
            store.get_file(inside, file.name)
            stamp.check(source)

    doing = f"{root}: copying {sum(stamp.size for _, stamp in versions) / 1e9:,.1f} GB into the cache folder"
    for name, stamp in Waiting.over(versions, doing, "files"):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        while not place.exists():
            if write_once(place, partial(fetch, root / name, stamp)):
                grown(stamp.size)
            else:
                time.sleep(LOOK_SECONDS)
        os.utime(place, ns=(time.time_ns(), place.stat().st_mtime_ns))  # it is used
    return folder
