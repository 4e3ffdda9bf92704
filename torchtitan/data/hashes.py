"""Compares what a run reads with the SHA-256 that were noted when it was written, beside training.

Training does not wait for the comparison to begin, but for its result before it saves, and before it ends.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan.cache import cache_folder
from torchtitan.data.blocks import Stamp
from torchtitan.data.index import SECONDS_BETWEEN_LOOKS, write_once
from torchtitan.data.sources import digest
from torchtitan.errors import DataError
from torchtitan.files import is_remote, sha256_of

AGAIN = "copy or make it again"


class Hashes:
    """The files of this process whose SHA-256 is known. A thread compares those first that have been read.

    The processes of a machine divide the files, and read each once in a version; the cache folder keeps the result.
    Files in an object store are compared only if they have been read, because that downloads them.
    """

    def __init__(self) -> None:
        self._changes = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Before another run in this process."""
        with self._changes:
            self.expected: dict[Path, tuple[str, Stamp]] = {}
            self.read: set[Path] = set()
            self._left: dict[Path, None] = {}  # those that are not compared yet
            self._wanted: dict[Path, None] = {}  # and of these, those that have been read
            self._faults: dict[Path, str] = {}
            self._thread: threading.Thread | None = None

    def add(self, hashes: Mapping[Path, str]) -> None:
        """Begins to compare these files."""
        versions = {path: (sha256, Stamp.of(path)) for path, sha256 in hashes.items()}
        new = {path: version for path, version in versions.items() if self.expected.get(path) != version}
        with self._changes:
            self.expected |= new
            self._left |= dict.fromkeys(path for path in new if not is_remote(path))
            for path in new:
                self._faults.pop(path, None)
        self._compare_all()

    def note_read(self, path: Path) -> None:
        """Says that the run has read something in this file."""
        if path in self.expected and path not in self.read:
            with self._changes:
                self.read.add(path)
                if path in self._left or is_remote(path):
                    self._wanted[path] = None
            self._compare_all()

    def fault(self, *paths: Path) -> str:
        """What is wrong with the first of these files that differs; "" if none does, as far as is known."""
        return next((self._faults[path] for path in paths if path in self._faults), "")

    @property
    def fault_in_what_was_read(self) -> str:
        with self._changes:
            return self.fault(*self._faults.keys() & self.read)

    def wait(self, cancelled: Callable[[], object] = lambda: False) -> bool:
        """Returns once all files that have been read are compared, or `cancelled` returns true: whether they are.
        Raises a DataError if one of them differs."""
        while True:
            complete = self.unverified == 0  # before the look at faults
            if fault := self.fault_in_what_was_read:
                raise DataError(fault)
            if complete or cancelled():
                return complete
            time.sleep(SECONDS_BETWEEN_LOOKS)

    @property
    def unverified(self) -> int:
        """The number of files that have been read and are not compared yet."""
        return len(self._wanted)

    @property
    def verified(self) -> int:
        """The number of files that have been read and are compared."""
        return len(self.read) - len(self._wanted)

    def _compare_all(self) -> None:
        with self._changes:
            if self._thread is None and self._next() is not None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="hashes")
                self._thread.start()

    def _next(self) -> Path | None:
        return next(iter(self._wanted or self._left), None)

    def _run(self) -> None:
        postponed = 0  # files in a row that other processes are reading
        while True:
            with self._changes:
                if self._thread is not threading.current_thread():
                    return  # it was forgotten
                if (path := self._next()) is None:
                    self._thread = None
                    return
                version = self.expected[path]
            fault = f"{path} does not have the SHA-256 that metadata.json beside it says; {AGAIN}."
            try:
                found = found_by_one(path, *version)
            except DataError as error:
                found, fault = "", str(error)
            except OSError as error:
                found, fault = "", f"{path} cannot be read ({error.strerror or error})."
            with self._changes:
                if self._thread is not threading.current_thread() or self.expected.get(path) != version:
                    continue
                if found not in (None, version[0]):
                    self._faults[path] = fault
                for waiting in (self._wanted, self._left):
                    if path in waiting:
                        del waiting[path]
                        if found is None:
                            waiting[path] = None  # the last one
            postponed = postponed + 1 if found is None else 0
            if postponed >= max(len(self._wanted), 1):
                time.sleep(SECONDS_BETWEEN_LOOKS)


def found_by_one(path: Path, expected: str, stamp: Stamp) -> str | None:
    """The SHA-256 of a file, which one process of the machine computes; None while another is doing so. Raises an
    OSError if the file cannot be read, and a DataError if it has changed."""

    def found() -> str:
        sha256 = sha256_of(path)
        stamp.check(path)
        return sha256

    def write_hash(file: BinaryIO) -> None:
        file.write(found().encode())

    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        place = cache_folder() / "verified" / digest([str(path.absolute()), stamp, expected])
        place.parent.mkdir(parents=True, exist_ok=True)
        write_once(place, write_hash)
        return place.read_text() if place.exists() else None
    return found()


HASHES = Hashes()
