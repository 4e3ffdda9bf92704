"""Records in files, read by number: where each begins, and those of JSONL.

Finding where records begin means reading every byte, so large data keep it in the cache folder. An index is int64: what
it was made from; for each file, and after the last, where its offsets begin; all offsets.
"""

import codecs
import io
import itertools
import json
import mmap
import re
import shutil
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchtitan.cache import LOOK_SECONDS, cache_folder, write_once
from torchtitan.data.sources import (
    LONGEST,
    UNCOUNTED,
    DataFiles,
    Document,
    Span,
    Tokens,
    Vocabulary,
    digest,
    say_once,
)
from torchtitan.errors import DataError, reason_of
from torchtitan.logging import Waiting, logger

Offsets = NDArray[np.int64]

WORTH_KEEPING = 1 << 26  # bytes of data; less is searched in a tenth of a second
PART_BYTES = 1 << 28  # bytes of data that a process searches at a time
CHUNK = 1 << 24  # bytes read at a time
LINES_LOOKED_AT = 20  # lines of each file that are read to check that the column exists
MOST_LOOKED_AT = 1 << 20  # bytes of these lines, unless one alone has more
SKIPS_LOGGED_SINGLY = 5
ARRAY_LOOKED_AT = 1 << 12  # bytes
ARRAY_BEGINS = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\]]")  # an array of objects, or an empty one
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # the first begins that of UTF-32, too
TEXT, TOKENS = "text", ("input_ids", "tokens")  # columns: the default of text_column, and what is read without it
MESSAGES, PROMPT, BESIDE = "messages", "prompt", ("completion", "tools")  # columns of conversations
# A string that does not end goes to the end of the file: looking for it from each quotation mark inside would be slow.
STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]]', re.DOTALL)


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
            time.sleep(LOOK_SECONDS)
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


@dataclass
class Skipped:
    """Counts unusable records, and logs them: the first few individually, then at 10, 100, 1000, ..."""

    name: str
    count: int = 0  # so far, in this process; a record is counted again in each epoch

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if self.count <= SKIPS_LOGGED_SINGLY:
            logger.warning(f"{self.name}: skipped {where} ({reason})")
        elif str(self.count).strip("0") == "1":
            logger.warning(f"{self.name}: {self.count} records skipped so far")

    def document(self, id: str, content_of: Callable[[Any], str | Tokens], record: Any) -> Document:
        """The document of a record; an empty one if `content_of` raises ValueError."""
        try:
            content = content_of(record)
            return Document(content, id) if isinstance(content, str) else Document("", id, tokens=content)
        except ValueError as error:
            self.add(id, str(error))
            return Document("", id)


def content_of_line(line: bytes | str, text_column: str, tokens: bool = False, chat: Any = None) -> str | Tokens:
    """The text in a line of JSON, or in a blank one; or, if `tokens` may be there instead, their ids; or, with a
    `Chat`, those of a conversation. Raises ValueError with the reason if there is none."""
    if not line.strip():
        return ""
    record = parsed_line(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    text = column_of(record, text_column)
    if chat is not None and is_conversation(text_column, text):
        conversation: Tokens = chat.tokens(record, text_column)
        return conversation
    if isinstance(text, list):
        if not text or any(type(id) is not int or not 0 <= id < UNCOUNTED for id in text):
            raise ValueError(f"neither text nor token ids in column {text_column!r}")
        if not tokens:
            raise ValueError(f"column {text_column!r} holds token ids, but text is wanted here")
        return np.array(text, np.int32)
    if not isinstance(text, str):
        raise ValueError(f"no text in column {text_column!r}")
    # JSON can hold halves of surrogate pairs, but they are not characters, and tokenizers refuse them.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_conversation(column: str, value: object) -> bool:
    """Whether a column with this value holds conversations: messages, or the prompt of a completion."""
    named = column.split(".")[-1] in (MESSAGES, PROMPT)
    return named or (isinstance(value, list) and isinstance((value or [0])[0], dict))


def column_of(record: Mapping[str, Any], column: str) -> Any:
    """The value of a column. `a.b` is field b of record a, unless the record has a column named `a.b`."""
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def parsed_line(line: bytes | str) -> Any:
    try:  # Of bytes, `json.loads` would guess an encoding, and take each line but the first of a file in UTF-16.
        return json.loads(line if isinstance(line, str) else line.decode("utf-8-sig", "surrogatepass"))
    except Exception as error:
        raise ValueError(f"not JSON: {reason_of(error)}") from error


def column_in(text_column: str, line: bytes | str, tokens: bool, chat: Any = None) -> str:
    """The text column; or, if it is not set, and a record lacks it, one of conversations or `TOKENS`, if wanted."""
    with suppress(ValueError):
        record = parsed_line(line)
        if isinstance(record, dict):
            return column_among(text_column, record, tokens, chat)
    return text_column


def column_among(text_column: str, columns: Collection[str], tokens: bool, chat: Any = None) -> str:
    wanted = (*((MESSAGES, PROMPT) if chat is not None else ()), *(TOKENS if tokens else ()))
    left = () if text_column != TEXT or TEXT in columns else wanted
    return next((name for name in left if name in columns), text_column)


def check_columns(
    name: str, text_column: str, lines: Iterable[bytes | str], tokens: bool = False, chat: Any = None
) -> None:
    """Raises a DataError unless one of these first lines has the column."""
    columns: set[str] = set()
    last_error = ValueError("it has no lines")
    for number, line in enumerate(lines):
        if number == 0:
            require_utf_8(name, line)
        try:
            content_of_line(line, text_column, tokens, chat)
            return
        except ValueError as error:
            last_error = error
        with suppress(ValueError):
            record = parsed_line(line)
            columns.update(record if isinstance(record, dict) else ())
    if text_column in columns:
        raise DataError(f"{name} cannot be read ({last_error}).")
    if columns:
        raise missing_column(name, text_column, sorted(columns))
    raise DataError(f"{name} is not JSONL, one JSON object per line ({last_error}).")


def require_utf_8(name: str, line: bytes | str) -> None:
    """Raises a DataError if a file with this first line has another encoding, in which lines end at other bytes."""
    if isinstance(line, bytes) and (b"\0" in line or line.startswith(UTF_16)):
        raise DataError(f"{name} is not UTF-8, but looks like UTF-16 or UTF-32; rewrite it, for example by iconv.")


def missing_column(name: str, text_column: str, columns: Sequence[str]) -> DataError:
    names = {column.split(" ")[0] for column in columns}
    return DataError(
        f"{name} has no text column {text_column!r}; its columns are {', '.join(columns)}: "
        "set training.text_column (or validation.text_column) to the one that holds the text"
        f"{', or training.train_on to train on conversations' if {MESSAGES, PROMPT} & names else ''}."
    )


class JsonLines(RecordFiles):
    """Files with one JSON object per line, or an array of objects. Unusable records are counted, logged and skipped."""

    def __init__(
        self, root: Path, files: Sequence[str], text_column: str, tokens: bool = False, chat: Any = None
    ) -> None:
        super().__init__(root, files)
        self.skipped = Skipped(self.name)
        self.arrays: set[int] = set()
        has_records = False  # files without any beside others do not matter
        for number, name in enumerate(files):
            if is_array(self, number):
                self.arrays.add(number)
            elif first := first_lines(self, number):
                text_column = column_in(text_column, first[0], tokens, chat)
                check_columns(str(root / name), text_column, first, tokens, chat)
                has_records = True
        self.offsets = record_offsets(Records(self, "records", partial(json_offsets, self, self.arrays), self.arrays))
        self.ends = np.cumsum([len(offsets) - 1 for offsets in self.offsets])
        for number in sorted(self.arrays):
            if size := min(len(self.offsets[number]) - 1, LINES_LOOKED_AT):
                first = [self.read(number, record) for record in range(size)]
                text_column = column_in(text_column, first[0], tokens, chat)
                check_columns(str(root / files[number]), text_column, first, tokens, chat)
                has_records = True
        if not has_records:
            check_columns(str(root / files[0]), text_column, [])
        self.content_of = partial(content_of_line, text_column=text_column, tokens=tokens, chat=chat)

    @property
    def fingerprint(self) -> str:
        return digest(self.named_sizes)

    def __getitem__(self, index: int) -> Document:
        file, line = self.locate(index)
        return self.skipped.document(f"{self.files[file]}:{line + 1}", self.content_of, self.read(file, line))

    def read(self, file: int, line: int) -> bytes:
        """The bytes of a record in a file."""
        start, stop = (int(offset) for offset in self.offsets[file][line : line + 2])
        if not 0 <= start <= stop <= self.sizes[file]:
            raise DataError(f"what {cache_folder() / 'records'} keeps about {self.root} is damaged; remove it.")
        if stop - start > LONGEST.size:
            LONGEST.check(stop - start, f"{self.root / self.files[file]}: record {line + 1:,}")
        with self.open(file) as opened:
            opened.seek(start)
            content = opened.read(stop - start)
        # Array elements are followed by a comma, and the last one by the closing bracket.
        return content.rstrip(b" \t\r\n,]") if file in self.arrays else content


def json_offsets(files: DataFiles, arrays: Collection[int], number: int, start: int, stop: int) -> Offsets:
    """Where records begin in a file of lines, or in an array, which is searched as a whole."""
    with files.open(number) as file:
        if number not in arrays:
            return line_offsets(file, start, stop)
        with mapped_file(file) as content:
            return array_offsets(content)


def array_offsets(content: "mmap.mmap | bytes") -> Offsets:
    """(records + 1) int64: the start of each object of an array, and the end of the file."""
    starts, depth = array("q"), 0
    for token in STRING_OR_BRACKET.finditer(content):
        match token[0][:1]:
            case b"{" | b"[":
                if depth == 1:
                    starts.append(token.start())
                depth += 1
            case b"}" | b"]":
                depth -= 1
    starts.append(len(content))
    return np.frombuffer(starts, np.int64)


def mapped_file(file: BinaryIO) -> "AbstractContextManager[mmap.mmap | bytes]":
    """The content of a file; of one in an object store, in memory."""
    if isinstance(getattr(file, "raw", None), io.FileIO):
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return nullcontext(file.read())


def is_array(files: DataFiles, number: int) -> bool:
    """Whether a file is a JSON array."""
    with files.open(number) as file:
        return ARRAY_BEGINS.match(file.read(ARRAY_LOOKED_AT)) is not None


def first_lines(files: DataFiles, number: int) -> list[bytes]:
    """The first lines that are not blank: one, and more if these are short."""
    lines: list[bytes] = []
    path = files.root / files.files[number]
    with files.open(number) as file, Waiting(f"{path}: looking for its first records"):
        for line in LONGEST.lines(file, path):
            lines += [line] if line.strip() else []
            if len(lines) == LINES_LOOKED_AT or sum(map(len, lines)) > MOST_LOOKED_AT:
                break
    return lines


def open_jsonl(_: str, root: Path, files: Sequence[str], text_column: str, vocabulary: Vocabulary | None) -> JsonLines:
    """Files with one JSON object per line, or an array of them. With a vocabulary, they may hold token ids."""
    return JsonLines(root, files, text_column, vocabulary is not None, vocabulary and vocabulary.chat)
