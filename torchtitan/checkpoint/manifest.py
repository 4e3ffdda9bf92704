"""`manifest.json`: what a checkpoint consists of, so that damage is seen before anything is loaded.

It holds the size and the SHA-256 of every other file, a SHA-256 of itself, and what people want to know of a
checkpoint without loading it: step, layout, versions, configuration.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from torchtitan.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
TRAIN_STATE = "train_state.json"
FORMAT = 1
PIECE = 4 << 20  # bytes read at a time
WORTH_A_THREAD = 1 << 20  # bytes; hashing fewer takes less time than handing them over


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says of a checkpoint: its step, the run's configuration, its files by name."""

    step: int
    configuration: Any
    files: dict[str, FileRecord]


class HashingFile(BufferedWriter):
    """A file that is hashed while it is written, so that nothing need be read back."""

    def __init__(self, path: Path) -> None:
        self._size = 0
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        super().__init__(FileIO(path, "w"), buffer_size=PIECE)

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            self._size += view.nbytes
            if view.nbytes < WORTH_A_THREAD:
                self._hash.update(view)
                return super().write(view)
            hashed = self._thread.submit(self._hash.update, view)  # beside the writing: neither holds the GIL
            try:
                return super().write(view)
            finally:
                hashed.result()

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def record(self) -> FileRecord:
        """Of what was written."""
        return FileRecord(self._size, self._hash.hexdigest())


def write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Writes a JSON file and waits until it is on disk."""
    with HashingFile(path) as file:
        file.write(json.dumps(content, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    return file.record()


def write_manifest(checkpoint: Path, about: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Adds the manifest to a checkpoint that is otherwise complete.

    Args:
        about: JSON-able: step, layout, versions, configuration.
        files: by name, as they were written.

    Raises:
        OSError: a file on disk has not the size of what was written.
    """
    for name, record in files.items():
        if (size := (checkpoint / name).stat().st_size) != record.size:
            raise OSError(f"{name} has {size} bytes on disk of {record.size} that were written")
    content = {"format": FORMAT, **about, "files": {name: asdict(files[name]) for name in sorted(files)}}
    content = json.loads(json.dumps(content, default=str))  # as it will be read, for its hash
    write_json(checkpoint / MANIFEST, {**content, "sha256": _digest(content)})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """
    Raises:
        CheckpointError: the manifest is missing, damaged, of another step than the folder's name says, or names other
            files than those of a checkpoint; its message is the reason alone.
    """
    try:
        content = json.loads(read_file(checkpoint / MANIFEST))
        if content.pop("sha256") != _digest(content):
            raise ValueError("its own hash does not match")
        if content["format"] > FORMAT:
            raise CheckpointError(f"{MANIFEST} is of format {content['format']}: a newer program wrote it")
        files = {name: FileRecord(int(file["size"]), file["sha256"]) for name, file in content["files"].items()}
        manifest = Manifest(int(content["step"]), content.get("configuration"), files)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged ({_reason(error)})") from None
    for name in files:
        if not inside(name):
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is not a file in the checkpoint")
    for name in (METADATA, TRAIN_STATE):
        if name not in files:  # it would be read without a look at its hash
            raise CheckpointError(f"{MANIFEST} does not name {name}")
    named = re.fullmatch(r"step-(\d+)", checkpoint.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{MANIFEST} is of step {manifest.step}: the folder is a copy under another name")
    return manifest


def read_file(path: Path) -> bytes:
    """
    Raises:
        OSError: it cannot be read, or is no file: a link leads elsewhere, a pipe never ends.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link, a folder or a pipe, not a file")
    return path.read_bytes()


def inside(name: str) -> bool:
    """Whether `name` is that of a file in the checkpoint's own folder, not a path that leads elsewhere."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def is_complete(checkpoint: Path) -> bool:
    """Whether every file is there in its size: a look that reads nothing but the manifest."""
    try:
        files = read_manifest(checkpoint).files
        return all(_has_size(checkpoint / name, record.size) for name, record in files.items())
    except CheckpointError:
        return False


def _has_size(path: Path, size: int) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


def damage(checkpoint: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a few words for each file; nothing where it is intact.

    Args:
        part, parts: only this share of the files is looked at, so that ranks can divide the reading. Shares are of
            about equal size.
    """
    try:
        files = read_manifest(checkpoint).files
    except CheckpointError as error:
        return [str(error)]
    load = [0] * parts
    found = []
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        lightest = load.index(min(load))
        load[lightest] += files[name].size + 1
        if lightest == part and (fault := _fault(checkpoint / name, files[name])):
            found.append(f"{name} {fault}")
    return found


def _fault(path: Path, expected: FileRecord) -> str:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is a link, a folder or a pipe, not a file"
        if status.st_size != expected.size:
            return f"has {status.st_size} bytes instead of {expected.size}"
        if sha256_of(path) != expected.sha256:
            return "has other content than was written (its SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    digest, buffer = hashlib.sha256(), bytearray(PIECE)
    with open(path, "rb", buffering=0) as file, memoryview(buffer) as view:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
