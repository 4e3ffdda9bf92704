"""`manifest.json` lists a checkpoint's files, so that damage is found before anything is loaded: their sizes and
SHA-256, a SHA-256 of itself, and for people the step, layout, versions and configuration."""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BufferedWriter, BytesIO, FileIO, RawIOBase
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import Strict, TypeAdapter, ValidationError
from typing_extensions import Buffer

from torchtitan.checkpoint.store import sizes
from torchtitan.container import available_cores
from torchtitan.errors import CheckpointError, printable, public
from torchtitan.files import PIECE, is_remote, sha256_of, store_errors
from torchtitan.strict_json import first_fault, named, unnamed
from torchtitan.world import number_in

MANIFEST = "manifest.json"
METADATA = ".metadata"
TRAIN_STATE = "train_state.json"
FORMAT = 1
MOST_THREADS = 8
LARGEST_JSON = 1 << 30  # bytes; a file that is read as a whole
WORTH_A_THREAD = 1 << 20  # bytes; hashing fewer is faster than handing them to a thread


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: Annotated[int, Strict(), Ge(0)]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`."""

    step: Annotated[int, Strict(), Ge(0)]
    files: dict[str, FileRecord]  # file name -> record
    configuration: Any = None  # the run's, without passwords
    keep: Annotated[bool, Strict()] = False  # for good
    average: dict[str, Any] | None = None  # what it is an average of, if it is (`interchange.convert.average`)


class Upload(RawIOBase):
    """A file in an object store, written from the start to the end. It exists once it is closed, not before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with store_errors(path):
            self._stream: Any = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        with memoryview(data) as view, store_errors(self._path):  # the stream holds what it is given in memory
            self._stream.write(view[:PIECE])
            return min(PIECE, view.nbytes)

    def tell(self) -> int:
        return int(self._stream.tell())

    def discard(self) -> None:
        """Forgets what was written."""
        stream, self._stream = self._stream, BytesIO()
        with contextlib.suppress(OSError, AttributeError), store_errors(self._path):
            stream.closed = True  # otherwise closing it later would complete the file
            stream.discard()

    def close(self) -> None:
        if not self.closed:
            super().close()
            with store_errors(self._path):
                self._stream.close()


class HashingFile(BufferedWriter):
    """A file that is hashed while it is written. An error in its context discards a file in an object store."""

    def __init__(self, path: Path) -> None:
        self._size = 0
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._upload = Upload(path) if is_remote(path) else None
        super().__init__(self._upload or FileIO(path, "w"), buffer_size=PIECE)

    def write(self, data: Buffer) -> int:
        with memoryview(data) as view:
            self._size += view.nbytes
            if view.nbytes < WORTH_A_THREAD:
                self._hash.update(view)
                return super().write(view)
            hashed = self._thread.submit(self._hash.update, view)  # in parallel: hashing and writing release the GIL
            try:
                return super().write(view)
            finally:
                hashed.result()

    def fileno(self) -> int:
        """For `os.fsync`, which torch calls without flushing first."""
        self.flush()
        return super().fileno()

    def sync(self) -> None:
        """Waits until it is on disk. A store says so when the file is closed."""
        if self._upload is None:
            os.fsync(self.fileno())

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error is not None and self._upload is not None:
            self._upload.discard()
        super().__exit__(error_type, error, trace)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def record(self) -> FileRecord:
        """Size and hash of what was written."""
        return FileRecord(self._size, self._hash.hexdigest())


def write_file(path: Path, content: bytes) -> FileRecord:
    """Writes a file and waits until it is on disk."""
    with HashingFile(path) as file:
        file.write(content)
        file.sync()
    return file.record()


def write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    return write_file(path, json.dumps(content, indent=1).encode())


def write_manifest(checkpoint: Path, about: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Adds the manifest to an otherwise complete checkpoint. Raises an OSError if a file's size on disk differs from
    what was written. `about` is JSON-able: step, layout, versions, configuration."""
    on_disk = sizes(checkpoint)
    for name, record in files.items():
        size = on_disk[name] if name in on_disk else (checkpoint / name).stat().st_size
        if size != record.size:
            raise OSError(f"{name} has {size} bytes on disk, but {record.size} were written")
    content = {"format": FORMAT, **about, "files": {name: asdict(files[name]) for name in sorted(files)}}
    content = named(content)  # the hash is of what will be read back
    write_json(checkpoint / MANIFEST, {**content, "sha256": _digest(content)})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises a CheckpointError, with only the reason, if the manifest is missing, damaged, of another step than the
    folder's name says, or lists files that a checkpoint cannot have."""
    try:
        content = json.loads(read_file(checkpoint / MANIFEST))
        if content.pop("sha256") != _digest(content):
            raise ValueError("its hash does not match its content")
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{MANIFEST} has format {content['format']}, written by a newer version of this program"
            )
        content["configuration"] = public(unnamed(content.get("configuration")))
        manifest = TypeAdapter(Manifest).validate_python(content)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _require_answer(checkpoint, error)
        raise CheckpointError(f"{MANIFEST} is damaged ({_reason(error)})") from None
    for name in manifest.files:
        if not inside(name):
            raise CheckpointError(f"{MANIFEST} lists {name!r}, which is not a file in the checkpoint")
    for name in (METADATA, TRAIN_STATE):
        if name not in manifest.files:  # its hash would not be checked
            raise CheckpointError(f"{MANIFEST} does not list {name}")
    named = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{MANIFEST} is of step {manifest.step}: the folder is a renamed copy")
    return manifest


def read_file(path: Path, follow_links: bool = False) -> bytes:
    """Raises an OSError if it cannot be read, or is no regular file: a link may lead elsewhere, a pipe not end."""
    with store_errors(path):
        require_file(path, follow_links)
        if path.stat().st_size > LARGEST_JSON:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST_JSON >> 30} GiB")
        return path.read_bytes()


def require_file(path: Path, follow_links: bool = False) -> None:
    """Raises an OSError if it does not exist, or opening it may never end."""
    with store_errors(path):
        status = path.stat() if follow_links or is_remote(path) else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        other = "folder, a pipe or a device" if follow_links else "link, a folder or a pipe"
        raise OSError(errno.EINVAL, f"it is a {other}, not a file")


def inside(name: str) -> bool:
    """Whether `name` is a file name in the checkpoint's own folder, not a path that leads elsewhere."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def manifest_if_complete(checkpoint: Path) -> Manifest | None:
    """The manifest, if every file exists with the right size, and no other. Reads only that."""
    try:
        manifest, on_disk = read_manifest(checkpoint), sizes(checkpoint)
        del on_disk[MANIFEST]
        return manifest if on_disk == {name: record.size for name, record in manifest.files.items()} else None
    except (CheckpointError, OSError):
        return None


def damage(checkpoint: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a few words per file; empty if it is intact. Each of `world_size` ranks
    reads another subset of the files, of about equal size."""
    try:
        files = read_manifest(checkpoint).files
        on_disk = sizes(checkpoint)
        foreign = sorted(on_disk.keys() - files - {MANIFEST})  # such as a module that a later command could import
    except Unreachable:
        raise
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:  # removed in the meantime
        _require_answer(checkpoint, error)
        return [f"it cannot be read ({error.strerror})"]
    names = sorted(files)
    own = [names[at] for at in balanced([files[name].size + 1 for name in names], world_size)[rank]]
    with ThreadPoolExecutor(threads_of_rank()) as threads:
        faults = threads.map(lambda name: _fault(checkpoint / name, files[name], on_disk.get(name)), own)
        return [f"{printable(name)} is not listed in {MANIFEST}" for name in foreign] + [
            f"{printable(name)} {fault}" for name, fault in zip(own, faults, strict=True) if fault
        ]


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The indices of `sizes` in `count` groups of about equal sum."""
    groups: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        lightest = load.index(min(load))
        groups[lightest].append(index)
        load[lightest] += sizes[index]
    return groups


def threads_of_rank() -> int:
    """Threads in which a rank hashes files: its share of this machine's cores, at most `MOST_THREADS`."""
    return max(1, min(MOST_THREADS, available_cores() // max(1, number_in("LOCAL_WORLD_SIZE", 1))))


def _fault(path: Path, expected: FileRecord, size: int | None) -> str:
    if size is None:
        return "is missing"
    if size < 0:
        return "is a link, a folder or a pipe, not a file"
    if size != expected.size:
        return f"has {size} bytes instead of {expected.size}"
    try:
        if sha256_of(path) != expected.sha256:
            return "has changed since it was written (its SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        _require_answer(path, error)
        return f"cannot be read ({error.strerror})"
    return ""


class Unreachable(CheckpointError):
    """An object store does not answer, or refuses: that says nothing about the checkpoint in it."""


def _require_answer(path: Path, error: Exception) -> None:
    if is_remote(path) and isinstance(error, OSError) and error.errno != errno.ENOENT:
        raise Unreachable(f"{path} cannot be read ({error.strerror}).") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, ValidationError):
        return first_fault(error)
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
