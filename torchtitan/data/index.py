"""Where the records of files begin. Finding that means reading every byte, so large data keep it in the cache folder.

An index is int64: what it was made from; for each file, and after the last, where its offsets begin; all offsets.
"""

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.cache import cache_folder
from torchtitan.data.blocks import Stamp, say_once
from torchtitan.data.sources import digest
from torchtitan.logging import Waiting

Offsets = NDArray[np.int64]

WORTH_KEEPING = 1 << 26  # bytes of data; less is searched in a tenth of a second
PART = 1 << 28  # bytes of data that a process searches at a time
CHUNK = 1 << 24  # bytes read at a time
SECONDS_BETWEEN_LOOKS = 0.1  # at what other processes have finished


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: int
    start: int
    stop: int


@dataclass
class Records:
    """Files of records: JSONL, or documents of tokens with a separator.

    Attributes:
        root, files: a folder, and names relative to it.
        stamps: of the files.
        arrays: numbers of the files that hold one JSON array.
        array_offsets: the offsets in such a file.
        tokens: the offsets of documents of tokens, from the number of a file and a range of its bytes.
        rule: what else decides where records begin; JSON.
    """

    root: Path
    files: Sequence[str]
    stamps: Sequence[Stamp]
    arrays: Collection[int]
    array_offsets: Callable[[Path], Offsets] | None = None
    tokens: Callable[[int, int, int], Offsets] | None = None
    rule: Sequence[object] = ()

    def parts(self) -> Iterator[list[Piece]]:
        """All bytes, in parts of about `PART` bytes."""
        part: list[Piece] = []
        size = 0
        for file, stamp in enumerate(self.stamps):
            step = max(stamp.size, 1) if file in self.arrays else PART
            for start in range(0, max(stamp.size, 1), step):
                if size >= PART:
                    yield part
                    part, size = [], 0
                part.append(Piece(file, start, min(start + step, stamp.size)))
                size += part[-1].stop - start
        yield part

    def search(self, part: Sequence[Piece]) -> Offsets:
        """The number of offsets in each piece, then those offsets."""
        of_pieces = []
        for number, start, stop in part:
            path = self.root / self.files[number]
            if self.tokens:
                self.stamps[number].check(path)
                offsets = self.tokens(number, start, stop)
            else:
                with self.stamps[number].open(path) as file:
                    array = self.array_offsets if number in self.arrays else None
                    offsets = array(path) if array else line_offsets(file, start, stop)
            if stop == self.stamps[number].size and stop not in offsets[-1:]:  # the last line does not end
                offsets = np.append(offsets, stop)
            of_pieces.append(offsets)
        return np.concatenate([np.array([len(offsets) for offsets in of_pieces], np.int64), *of_pieces])

    def heading(self, parts: Sequence[Sequence[Piece]], counts: Sequence[Offsets]) -> Offsets:
        """The index without the offsets, from the number of offsets in each piece of each part."""
        begin = np.zeros(len(self.files) + 1, np.int64)
        np.add.at(begin, [piece.file + 1 for part in parts for piece in part], np.concatenate(counts))
        return np.concatenate([[self.identity], begin.cumsum()])

    @cached_property
    def identity(self) -> int:
        """63 bits that change if a file does, or the order of files."""
        return int(digest([list(self.files), list(self.stamps), sorted(self.arrays), *self.rule]), 16) >> 1


def line_offsets(file: BinaryIO, start: int, stop: int) -> Offsets:
    """The starts of lines after `start`, up to and with `stop`; and 0, if that is `start`."""
    offsets = [np.zeros(1 if start == 0 else 0, np.int64)]
    file.seek(start)
    while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
        offsets.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + start + 1)
        start += len(chunk)
    return np.concatenate(offsets)


def record_offsets(records: Records) -> list[Offsets]:
    """For each file (records + 1) int64: the byte offset of each record, and the end of the last.

    All processes together search large data once, and map the result from the disk.

    Raises:
        DataError: a file has changed since its stamp was made.
        OSError: a file cannot be read.
    """
    size = sum(stamp.size for stamp in records.stamps)
    parts = list(records.parts())
    doing = f"looking for the {'documents' if records.tokens else 'records'} in {size / 1e9:,.1f} GB of {records.root}"
    index = None
    if size >= WORTH_KEEPING:
        try:
            with Waiting(doing, len(parts), "parts") as waiting:
                index = kept_index(records, parts, waiting)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
            say_once(f"each start looks for the records of {records.root}: the result cannot be kept ({error})")
    if index is None:
        contents = [records.search(part) for part in Waiting.over(parts, doing, "parts")]
        both = list(zip(contents, map(len, parts), strict=True))
        counts, offsets = [content[:n] for content, n in both], [content[n:] for content, n in both]
        index = np.concatenate([records.heading(parts, counts), *offsets])
    begin, every = index[1 : len(records.files) + 2], index[len(records.files) + 2 :]
    return [every[first:last] for first, last in itertools.pairwise(begin)]


def kept_index(records: Records, parts: Sequence[Sequence[Piece]], waiting: Waiting) -> Offsets:
    """The index from the cache folder. Until it is there, each process searches a part that no other is searching."""
    name = digest(str(records.root.resolve() / (records.files[0] if len(records.files) == 1 else "")))
    place = cache_folder() / "records" / name
    working = place.with_name(f"{name}-{records.identity}")
    paths = [working / str(number) for number in range(len(parts))]

    def join(file: BinaryIO) -> None:
        counts = [np.fromfile(path, np.int64, len(part)) for path, part in zip(paths, parts, strict=True)]
        records.heading(parts, counts).tofile(file)
        for path, part in zip(paths, parts, strict=True):
            with path.open("rb") as content:
                content.seek(8 * len(part))
                shutil.copyfileobj(content, file)

    def search(part: Sequence[Piece], file: BinaryIO) -> None:
        records.search(part).tofile(file)

    left = list(range(len(parts)))
    while (index := mapped(place, records)) is None:
        working.mkdir(parents=True, exist_ok=True)
        wrote = False
        for number in left:
            waiting.done = number
            wrote |= write_once(paths[number], paths[number].exists, partial(search, parts[number]))
        left = [number for number in left if not paths[number].exists()]
        if not left and write_once(working / "index", lambda: mapped(place, records) is not None, join, place):
            for folder in place.parent.glob(f"{name}-*"):  # also of earlier versions of the files
                shutil.rmtree(folder, ignore_errors=True)
        elif not wrote:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    return index


def mapped(place: Path, records: Records) -> Offsets | None:
    """The index there, if it is complete and of these records."""
    try:
        index = np.memmap(place, np.int64, "r")
    except (FileNotFoundError, ValueError):  # ValueError: it is empty, or was cut off
        return None
    heading = len(records.files) + 2
    complete = len(index) >= heading and len(index) == heading + index[heading - 1]
    return np.asarray(index) if complete and index[0] == records.identity else None


def write_once(
    path: Path, written: Callable[[], bool], write: Callable[[BinaryIO], None], target: Path | None = None
) -> bool:
    """Writes a file, and renames it to `target`; unless it is `written`, or another process is writing it.

    Returns:
        Whether this process wrote it.
    """
    new = path.with_suffix(".new")
    try:
        with new.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if written():
                return False
            file.truncate(0)
            write(file)
            file.flush()
            os.fsync(file.fileno())
            new.replace(target or path)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        if new.parent.exists():
            raise
        return False  # another process has removed the folder, because the index is complete
