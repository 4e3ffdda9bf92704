"""Verifies what a run reads beside training, as by the SHA-256 that were noted when it was written.

Training begins at once, but waits for the result before it saves, and before it ends.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torchtitan.cache import LOOK_SECONDS, cache_folder, write_once
from torchtitan.data.sources import Stamp, digest, sample_of
from torchtitan.errors import DataError, reason_of
from torchtitan.files import is_remote, sha256_of

REMAKE = "copy or make it again"
INTACT = b"intact"  # in the cache folder


class Check(NamedTuple):
    """How a file is verified."""

    rule: str  # identifies the check
    fault: Callable[[], str]  # reads the file; a sentence, or "" if it is right


class Hashes:
    """The files of this process that can be verified. A thread does so, first with those that have been read.

    The processes of a machine divide the files, and read each once in a version; the cache folder keeps the result.
    Files in an object store are verified only if they have been read, because that downloads them.
    """

    def __init__(self) -> None:
        self._changes = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Before another run in this process."""
        with self._changes:
            self.checks: dict[Path, tuple[Check, Stamp]] = {}
            self.read: set[Path] = set()
            self._left: dict[Path, None] = {}  # those that are not verified yet
            self._wanted: dict[Path, None] = {}  # and of these, those that have been read
            self._faults: dict[Path, str] = {}
            self._thread: threading.Thread | None = None

    def add(self, checks: Mapping[Path, Check]) -> None:
        """Begins to verify these files."""
        new = {}
        for path, check in checks.items():
            known, stamp = self.checks.get(path), Stamp.of(path)
            if known is None or (known[0].rule, known[1]) != (check.rule, stamp):
                new[path] = check, stamp
        with self._changes:
            self.checks |= new
            self._left |= dict.fromkeys(path for path in new if not is_remote(path))
            for path in new:
                self._faults.pop(path, None)
        self._start()

    def note_read(self, path: Path) -> None:
        """Says that the run has read something in this file."""
        if path in self.checks and path not in self.read:
            with self._changes:
                self.read.add(path)
                if path in self._left or is_remote(path):
                    self._wanted[path] = None
            self._start()

    def fault(self, *paths: Path) -> str:
        """What is wrong with the first of these files that is damaged; "" if none is, as far as is known."""
        return next((self._faults[path] for path in paths if path in self._faults), "")

    @property
    def fault_in_what_was_read(self) -> str:
        with self._changes:
            return self.fault(*self._faults.keys() & self.read)

    def wait(self, cancelled: Callable[[], object] = lambda: False) -> bool:
        """Returns once all files that have been read are verified, or `cancelled` returns true: whether they are.
        Raises a DataError if one of them is damaged."""
        while True:
            complete = self.unverified == 0  # before the look at faults
            if fault := self.fault_in_what_was_read:
                raise DataError(fault)
            if complete or cancelled():
                return complete
            time.sleep(LOOK_SECONDS)

    @property
    def unverified(self) -> int:
        """The number of files that have been read and are not verified yet."""
        return len(self._wanted)

    @property
    def verified(self) -> int:
        """The number of files that have been read and are verified."""
        return len(self.read) - len(self._wanted)

    def _start(self) -> None:
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
                check, stamp = self.checks[path]
            try:
                fault = fault_found_by_one(path, check, stamp)
            except DataError as error:
                fault = str(error)
            except Exception as error:  # otherwise the run would wait for this thread forever
                reason = error.strerror if isinstance(error, OSError) else reason_of(error)
                fault = f"{path} cannot be verified ({reason}); {REMAKE}."
            with self._changes:
                if self._thread is not threading.current_thread() or self.checks.get(path) != (check, stamp):
                    continue
                if fault:
                    self._faults[path] = fault
                for waiting in (self._wanted, self._left):
                    if path in waiting:
                        del waiting[path]
                        if fault is None:
                            waiting[path] = None  # the last one
            postponed = postponed + 1 if fault is None else 0
            if postponed >= max(len(self._wanted), 1):
                time.sleep(LOOK_SECONDS)


def fault_found_by_one(path: Path, check: Check, stamp: Stamp) -> str | None:
    """What is wrong with a file, which one process of the machine finds; None while another is at it. Raises an OSError
    if the file cannot be read, and a DataError if it has changed."""

    def fault() -> str:
        found = check.fault()
        stamp.check(path)
        return found

    def write_fault(file: BinaryIO) -> None:
        file.write(fault().encode() or INTACT)

    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        place = cache_folder() / "verified" / digest([str(path.absolute()), stamp, sample_of(path), check.rule])
        place.parent.mkdir(parents=True, exist_ok=True)
        write_once(place, write_fault)
        if not place.exists():
            return None
        if place.read_bytes() == INTACT:
            return ""
    return fault()


def by_sha256(path: Path, sha256: str) -> Check:
    def fault() -> str:
        same = sha256_of(path) == sha256
        return "" if same else f"{path} does not have the SHA-256 that metadata.json beside it says; {REMAKE}."

    return Check(sha256, fault)


HASHES = Hashes()
