"""Where the records of files begin. Finding that means reading every byte, so large data keep it in the cache folder.

An index is int64: what it was made from; for each file, and after the last, where its offsets begin; all offsets.
"""

import itertools
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchtitan.cache import cache_folder
from torchtitan.data.file_versions import say_once
from torchtitan.data.sources import DataFiles, Span, digest
from torchtitan.data.write_once import INDEX_LOOK_SECONDS, write_once
from torchtitan.logging import Waiting

Offsets = NDArray[np.int64]

WORTH_KEEPING = 1 << 26  # bytes of data; less is searched in a tenth of a second
PART_BYTES = 1 << 28  # bytes of data that a process searches at a time
CHUNK = 1 << 24  # bytes read at a time


class RecordFiles(DataFiles):
    """Files of documents, which lie in parts: files, or batches of rows of a table."""

    ends: Offsets  # the number of documents up to the end of each part

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """The part with a document, and the document's number in it."""
        part = int(self.ends.searchsorted(index, side="right"))
        return part, index - (int(self.ends[part - 1]) if part else 0)


@dataclass
class Records:
    """Files of records, such as JSONL, or documents of tokens with a separator."""

    data: DataFiles
    name: str  # what the records are called, in the plural
    # Where records begin in a file's bytes, from its number and their range; and the end of one that ends with these.
    offsets: Callable[[int, int, int], Offsets]
    uncut: Collection[int] = ()  # numbers of the files that are searched as a whole
    rule: Sequence[object] = ()  # what else decides where records begin; JSON

    def portions(self) -> Iterator[list[Span]]:
        """All bytes, in portions of about `PART_BYTES` bytes."""
        portion: list[Span] = []
        size = 0
        for file, of_file in enumerate(self.data.sizes):
            step = max(of_file, 1) if file in self.uncut else PART_BYTES
            for start in range(0, max(of_file, 1), step):
                if size >= PART_BYTES:
                    yield portion
                    portion, size = [], 0
                portion.append(Span(file, start, min(start + step, of_file)))
                size += portion[-1].stop - start
        yield portion

    def search(self, portion: Sequence[Span]) -> Offsets:
        """The number of offsets in each piece, then the offsets."""
        of_pieces = []
        for number, start, stop in portion:
            offsets = self.offsets(number, start, stop)
            if stop == self.data.sizes[number] and stop not in offsets[-1:]:  # the last line does not end
                offsets = np.append(offsets, stop)
            of_pieces.append(offsets)
        return np.concatenate([np.array([len(offsets) for offsets in of_pieces], np.int64), *of_pieces])

    def index(self, portions: Sequence[Sequence[Span]], contents: Sequence[Offsets]) -> Iterator[Offsets]:
        """The index, in pieces, from what `search` finds in each portion."""
        begin = np.zeros(len(self.data.files) + 1, np.int64)
        for portion, content in zip(portions, contents, strict=True):
            np.add.at(begin, [piece.file + 1 for piece in portion], content[: len(portion)])
        yield np.concatenate([[self.identity], begin.cumsum()])
        yield from (content[len(portion) :] for portion, content in zip(portions, contents, strict=True))

    @cached_property
    def identity(self) -> int:
        """63 bits that change if a file does, or the order of files."""
        data = self.data
        return int(digest([list(data.files), list(data.stamps), data.samples, sorted(self.uncut), *self.rule]), 16) >> 1


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
    """
    root, size = records.data.root, sum(records.data.sizes)
    portions = list(records.portions())
    doing = f"looking for the {records.name} in {size / 1e9:,.1f} GB of {root}"
    index = None
    if size >= WORTH_KEEPING:
        try:
            with Waiting(doing, len(portions), "parts") as waiting:
                index = kept_index(records, portions, waiting)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
            say_once(f"each start looks for the records of {root}: the result cannot be kept ({error})")
    if index is None:
        contents = [records.search(portion) for portion in Waiting.over(portions, doing, "parts")]
        index = np.concatenate(list(records.index(portions, contents)))
    heading = heading_of(records)
    begin, every = index[1:heading], index[heading:]
    return [every[first:last] for first, last in itertools.pairwise(begin)]


def kept_index(records: Records, portions: Sequence[Sequence[Span]], waiting: Waiting) -> Offsets:
    """The index from the cache folder. Until it exists, each process searches portions that no other is searching."""
    data = records.data
    name = digest(str(data.root.resolve() / (data.files[0] if len(data.files) == 1 else "")))
    place = cache_folder() / "records" / name
    working = place.with_name(f"{name}-{records.identity}")
    paths = [working / str(number) for number in range(len(portions))]

    def join(file: BinaryIO) -> None:
        for piece in records.index(portions, [np.memmap(path, np.int64, "r") for path in paths]):
            piece.tofile(file)

    def search(portion: Sequence[Span], file: BinaryIO) -> None:
        records.search(portion).tofile(file)

    left = list(range(len(portions)))
    while (index := mapped_index(place, records)) is None:
        working.mkdir(parents=True, exist_ok=True)
        wrote = False
        for number in left:
            waiting.done = number
            wrote |= write_once(paths[number], partial(search, portions[number]))
        left = [number for number in left if not paths[number].exists()]
        if not left and write_once(working / "index", join, lambda: mapped_index(place, records) is not None, place):
            for folder in place.parent.glob(f"{name}-*"):  # also of earlier versions of the files
                shutil.rmtree(folder, ignore_errors=True)
        elif not wrote:
            time.sleep(INDEX_LOOK_SECONDS)
    return index


def mapped_index(place: Path, records: Records) -> Offsets | None:
    """The index there, if it is complete and of these records."""
    try:
        index = np.memmap(place, np.int64, "r")
    except (FileNotFoundError, ValueError):  # ValueError: it is empty, or was cut off
        return None
    heading = heading_of(records)
    complete = len(index) >= heading and len(index) == heading + index[heading - 1]
    complete = complete and index[1] == 0 and bool((np.diff(index[1:heading]) > 0).all())
    return np.asarray(index) if complete and index[0] == records.identity else None


def heading_of(records: Records) -> int:
    """The numbers in an index before the offsets."""
    return len(records.data.files) + 2
