"""Documents and their sources: the protocols; data files, in the version that they have; segmented text files, such as
Python's standard library."""

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from torchtitan.errors import DataError
from torchtitan.files import is_remote, store_errors
from torchtitan.logging import logger
from torchtitan.registry import deferred

__all__ = ["Document", "Drawn", "Source", "StreamedSource", "TextFiles", "Vocabulary", "digest", "python_stdlib"]

_store_file: Callable[..., io.RawIOBase] = deferred("torchtitan.data.blocks:StoreFile")

SMALLEST_SEGMENT, LARGEST_SEGMENT = 1 << 10, 1 << 16  # bytes

T = TypeVar("T")
Tokens = NDArray[np.integer[Any]]
UNCOUNTED = 1 << 30  # added to the id of a token that is not to be predicted, until it is in a window

SAMPLE = 1 << 16  # bytes of the beginning, the middle and the end of a file
MOST_SAMPLED = 10_000  # files; of more, evenly spread ones
# What tells versions of an object apart, by store; the first that its listing has.
VERSION = ("ETag", "etag", "generation", "blob_id", "xet_hash", "mtime", "LastModified", "last_modified", "created")

# Standard library folders with tests (some deliberately malformed), other packages or build settings.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """Text to train on, or its tokens.

    Attributes:
        text: an empty text is skipped, without BOS and EOS.
        id: shows people and tests what was trained on.
        starts: it is a complete document or the beginning of one, and gets a BOS.
        ends: it is a complete document or the end of one, and gets an EOS.
        tokens: ids to train on as they are, instead of a text; integers. For those that do not count: `UNCOUNTED`.
    """

    text: str
    id: str
    starts: bool = True
    ends: bool = True
    tokens: Tokens | None = None


def without_marks(tokens: Tokens) -> Tokens:
    """Token ids of a file in which none is marked by `UNCOUNTED`. Raises a ValueError if one is that large."""
    if (largest := tokens.max(initial=0)) >= UNCOUNTED:
        raise ValueError(f"token id {largest} is not of any vocabulary")
    return tokens


class Vocabulary(NamedTuple):
    """What tokens that were made before are compared with, and what their files may not say.

    Attributes:
        size: largest id + 1.
        fingerprint: `Tokenizer.ids_fingerprint`.
        separators: ids that may divide tokens into documents; the first one does, unless the tokens begin with another.
            Empty: nothing does.
        dtype: numpy's name of it; None: as the content of a file tells.
        ends: BOS and EOS that the run adds to documents of text; None: it adds none.
        chat: a `conversations.Chat`, which makes tokens of conversations; None: they are not wanted.
    """

    size: int
    fingerprint: str
    separators: Sequence[int]
    dtype: str | None
    ends: tuple[int | None, int | None] = (None, None)
    chat: Any = None


class Source(Protocol):
    """Documents by index. `fingerprint` does not depend on where the data are stored, and changes when they change.

    The loader's thread reads them. An unusable document is an empty `Document`.
    """

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Document: ...


class Drawn(NamedTuple):
    """A document in the stream of a row.

    Attributes:
        document: what was drawn.
        epoch: how often the row has read its documents before, from 0.
        position: where the stream resumes after this document; JSON.
    """

    document: Document
    epoch: int
    position: Any


class StreamedSource(Protocol):
    """Documents that can only be read sequentially. The source itself deals them to the rows of a batch."""

    @property
    def fingerprint(self) -> str: ...

    def documents(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        """The endless stream of row `row` of `rows`, from `position` (None: the start). It never yields the same
        document twice in an epoch. `seed` None: no shuffling. Raises a DataError if the row has no documents."""


AnySource = Source | StreamedSource


def position_from(kind: Callable[..., T], values: Any) -> T:
    """A position, or a part of one, from JSON: fields by name. Earlier versions wrote a list of the values. Raises a
    ValueError if a field is missing, or unknown, or a number is none: with a default, the source would begin anew."""
    hints = get_type_hints(kind)
    if isinstance(values, dict):
        if values.keys() != hints.keys():
            raise ValueError(f"a position has {', '.join(values) or 'nothing'}, not {', '.join(hints)}")
        position = kind(**values)
    elif isinstance(values, list | tuple):
        position = kind(*values)
    else:
        raise ValueError(f"a position is {values!r:.40}")
    for name, hint in hints.items():
        number = getattr(position, name)
        if hint is int and not (type(number) is int and 0 <= number < 1 << 63):
            raise ValueError(f"{name} of a position is {number!r:.40}")
    return position


def digest(value: object) -> str:
    """16 hexadecimal digits that identify a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@dataclass
class Longest:
    """The bound on a line, and on the text or tokens of a record, of all sources of a process."""

    size: int = 100_000_000  # bytes, as training.max_document_mb

    def check(self, size: int, where: str) -> None:
        """Raises a DataError if `where`, with `size` bytes, is longer."""
        if size > self.size:
            raise DataError(
                f"{where} has more than {self.size / 1e6:,.0f} MB, which training.max_document_mb allows; raise it, or "
                "divide the record, or remove it."
            )

    def lines(self, file: BinaryIO, path: object) -> Iterator[bytes]:
        """The lines of a file. Holds one at a time."""
        for count, line in enumerate(iter(partial(file.readline, self.size + 1), b""), 1):
            if len(line) > self.size:
                self.check(len(line), f"{path}: line {count:,}")
            yield line


LONGEST = Longest()


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


class Span(NamedTuple):
    """Bytes `start` to `stop` of a file; of text, before both ends are moved to the next line start."""

    file: int
    start: int
    stop: int


class DataFiles:
    """Data files in the version that they have now.

    Args:
        root: folder that `files`, and names in ids and fingerprints, are relative to.
        stamps: of the files, if known.
    """

    def __init__(self, root: Path, files: Sequence[str], stamps: Sequence[Stamp] | None = None) -> None:
        self.root = root
        self.files = files
        self.stamps = [Stamp.of(root / name) for name in files] if stamps is None else stamps
        self.sizes = [stamp.size for stamp in self.stamps]
        self.name = files[0] if len(files) == 1 else root.name  # in messages

    @property
    def named_sizes(self) -> list[tuple[str, int]]:
        return list(zip(self.files, self.sizes, strict=True))

    @cached_property
    def samples(self) -> list[str]:
        """`sample_of` for each file: what is kept of the files is of these."""
        return samples_of([self.root / name for name in self.files])

    @contextmanager
    def open(self, number: int) -> Iterator[BinaryIO]:
        """A file, by its number. Raises a DataError if it cannot be read, or has changed."""
        path = self.root / self.files[number]
        try:
            with self.stamps[number].open(path) as file:
                yield file
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error


class TextFiles(DataFiles):
    """UTF-8 text files, each one document, which may be split into several segments.

    Segments follow the rule of Hadoop's text splits: a segment contains the lines that start within its bytes. So file
    sizes suffice to lay them out, without reading. A line longer than 64 KiB is split between characters.

    Args:
        spans: the bytes that each segment begins in; None: one segment for each non-empty file.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        spans: Sequence[Span] | None = None,
        stamps: Sequence[Stamp] | None = None,
    ) -> None:
        super().__init__(root, files, stamps)
        unsplit = (Span(number, 0, size) for number, size in enumerate(self.sizes) if size)
        self.spans = list(unsplit) if spans is None else list(spans)

    @property
    def fingerprint(self) -> str:
        return digest([self.named_sizes, self.spans])

    def cut(self, pieces: int, largest: int = LARGEST_SEGMENT) -> "TextFiles":
        """The same text in about `pieces` segments, of 1 KiB to `largest` bytes, each within one file."""
        total = sum(span.stop - span.start for span in self.spans)
        size = max(min(total // pieces, largest), SMALLEST_SEGMENT)
        return self.with_spans(
            Span(span.file, start, min(start + size, span.stop))
            for span in self.spans
            for start in range(span.start, span.stop, size)
        )

    def with_spans(self, spans: Iterable[Span]) -> "TextFiles":
        return TextFiles(self.root, self.files, list(spans), self.stamps)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Document:
        span = self.spans[index]
        name, size = self.files[span.file], self.sizes[span.file]
        with self.open(span.file) as file:
            start, stop = (line_start(file, offset, size) for offset in (span.start, span.stop))
            file.seek(start)
            content = file.read(stop - start)
        try:
            text = content.decode("utf-8" if start else "utf-8-sig")  # a byte order mark is no part of the text
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.root / name} is not UTF-8 text: byte {start + error.start} cannot be decoded; "
                "rewrite the file, or remove it."
            ) from error
        starts, ends = span.start == 0, stop == size  # a later segment may be empty: the last line may begin here
        return Document(text, name if starts and ends else f"{name}@{span.start}", starts, ends)


def line_start(file: BinaryIO, offset: int, size: int) -> int:
    """The first line start at or after byte `offset`, or a character start if the line is too long.

    It never decreases as `offset` grows, so adjacent segments neither overlap nor leave a gap.
    """
    if offset == 0 or offset >= size:
        return min(offset, size)
    file.seek(offset - 1)
    line = file.readline(LARGEST_SEGMENT + 1)
    if line.endswith(b"\n") or offset - 1 + len(line) == size:
        return offset - 1 + len(line)
    inside_character = 0
    while inside_character < 3 and line[1 + inside_character] & 0b1100_0000 == 0b1000_0000:
        inside_character += 1
    return offset + inside_character


def python_stdlib() -> TextFiles:
    """The running Python's own standard library: about 12 MB of real text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    return TextFiles(root, python_files(root))


@cache
def python_files(root: Path) -> tuple[str, ...]:
    """The names of the library's files, sorted; looking for them takes a sixth of a second."""
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in STDLIB_LEFT_OUT and not s.startswith("config-"))
        inside = Path(folder).relative_to(root)
        # _sysconfigdata*.py is generated when Python is built and names the build machine.
        names += [(inside / f).as_posix() for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
    return tuple(sorted(names))
