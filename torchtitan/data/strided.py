"""Deals documents to the rows of a batch: shuffled in each epoch, an independent stream for each row."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torchtitan.data.sources import (
    AnySource,
    Document,
    Drawn,
    Source,
    StreamedSource,
    TextFiles,
    digest,
    position_from,
)
from torchtitan.errors import DataError, counted
from torchtitan.files import is_uri

HELD_OUT_EVERY = 100  # one document in this many is held out
MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """64 well-mixed bits of an integer: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def permute_index(index: int, length: int, key: int) -> int:
    """The image of `index` under a permutation of 0 to `length`, chosen by `key`.

    A Feistel network of four rounds over the next power of four, iterated until the result is in range (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no table, so a billion documents take no memory,
    and gives the same result on every platform and version.
    """
    half = max((length - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):  # mix64(key ^ mix64(right << 2 | turn)), without calls, which take half of the time
            value = ((right << 2 | turn) + 0x9E3779B97F4A7C15) & MASK64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
            value = ((key ^ value ^ (value >> 31)) + 0x9E3779B97F4A7C15) & MASK64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
            left, right = right, left ^ ((value ^ (value >> 31)) & mask)
        index = left << half | right
        if index < length:
            return index


def rotated(place: int, length: int, rows: int, turn: int) -> int:
    """The image of `place` under a permutation that rotates each complete block of `rows` places, by another number in
    each block and turn; in turn 0 none."""
    block, row = divmod(place, rows)
    if turn == 0 or (block + 1) * rows > length:
        return place
    return block * rows + (row + mix64(mix64(turn) + block)) % rows


def is_remote_source(source: Source) -> bool:
    """Whether a source says so, or its files are in an object store."""
    return getattr(source, "is_remote", is_uri(str(getattr(source, "root", ""))))


class StridedPosition(NamedTuple):
    """Where a row resumes in a permutation of documents."""

    epoch: int
    place: int  # the next document's, in the order of the epoch
    turn: int = 0  # number of the rotation, which shuffled documents do not have


@dataclass(eq=False)
class StridedSource:
    """Adapts a random-access source to a streamed one: row j of B reads documents j, j + B, ... of a permutation.

    Without shuffling, documents stay in order, but later epochs give a block's B documents to other rows. Otherwise the
    same rows would read short documents again and again, while others still read long ones.
    """

    source: Source
    name: str  # for messages

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def is_remote(self) -> bool:
        """Whether reading a document takes a round trip, so that rows are read at the same time, by threads."""
        return is_remote_source(self.source)

    def documents(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        length = len(self.source)
        if length < rows:
            raise DataError(
                f"{self.name} has {counted(length, 'document')} for the {counted(rows, 'row')} of a global batch; "
                "lower the batch size or add documents."
            )
        return self.endless(row, rows, seed, position)

    def endless(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        length = len(self.source)
        epoch, place, turn = position_from(StridedPosition, (0, row) if position is None else position)
        while True:
            key = None if seed is None else mix64(mix64(seed) + epoch)
            while place < length:
                index = rotated(place, length, rows, turn) if key is None else permute_index(place, length, key)
                place += rows
                yield Drawn(self.source[index], epoch, StridedPosition(epoch, place, turn)._asdict())
            epoch, place = epoch + 1, row if key is not None else place - length
            turn = 0 if key is not None else epoch


@dataclass(eq=False)
class SplitSource:
    """Either every hundredth document of a source, or all others."""

    source: Source
    held_out: bool

    @property
    def fingerprint(self) -> str:
        return digest([self.source.fingerprint, self.held_out])

    @property
    def is_remote(self) -> bool:
        return is_remote_source(self.source)

    def __len__(self) -> int:
        held_out = len(self.source) // HELD_OUT_EVERY
        return held_out if self.held_out else len(self.source) - held_out

    def __getitem__(self, index: int) -> Document:
        if self.held_out:
            return self.source[index * HELD_OUT_EVERY + HELD_OUT_EVERY - 1]
        return self.source[index + index // (HELD_OUT_EVERY - 1)]


def in_part(held_out: bool, id: str) -> bool:
    """Whether a streamed document is in the held-out part, or else in the training part. The id decides."""
    return (zlib.crc32(id.encode()) % HELD_OUT_EVERY == 0) == held_out


@dataclass(eq=False)
class StreamedSplit:
    """A streamed source in which the documents of the other part are empty."""

    source: StreamedSource
    held_out: bool

    @property
    def fingerprint(self) -> str:
        return digest([self.source.fingerprint, self.held_out])

    def documents(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        for drawn in self.source.documents(row, rows, seed, position):
            document = drawn.document
            if not in_part(self.held_out, document.id):
                document = replace(document, text="", tokens=None)
            yield drawn._replace(document=document)


def split_held_out(source: AnySource, held_out: bool, name: str) -> AnySource:
    """One document in 100 of a source, held out, or else all others. Raises a DataError if there are fewer than 100."""
    if not hasattr(source, "__getitem__"):
        if not hasattr(source, "only"):
            return StreamedSplit(source, held_out)
        # Dealing one part alone gives every row its share of it.
        subset_name = f"held-out part of {name}" if held_out else name
        return source.only(partial(in_part, held_out), subset_name)  # type: ignore[no-any-return]
    if isinstance(source, TextFiles):
        # Split independently of the batch size, so that the held-out part depends only on the data.
        source = source.cut(4 * HELD_OUT_EVERY)
    if len(source) < HELD_OUT_EVERY:  # type: ignore[arg-type]
        raise DataError(
            f"{name} has {counted(len(source), 'document')}, too few to hold out one in "  # type: ignore[arg-type]
            f"{HELD_OUT_EVERY}; set validation.dataset_path to other text, or set validation.enabled = false."
        )
    if not isinstance(source, TextFiles):
        return SplitSource(source, held_out)  # type: ignore[arg-type]
    spans = enumerate(source.spans, start=1)
    return source.with_spans(span for number, span in spans if (number % HELD_OUT_EVERY == 0) == held_out)
