"""Random-access sources whose documents are records with a text column: JSONL, Parquet and Arrow files."""

import codecs
import glob
import json
import mmap
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchtitan.cache import cache_folder
from torchtitan.data.blocks import StoreFile
from torchtitan.data.file_versions import samples_of
from torchtitan.data.index import Offsets, RecordFiles, Records, line_offsets, record_offsets
from torchtitan.data.sources import LONGEST, UNCOUNTED, DataFiles, Document, Tokens, Vocabulary, digest, without_marks
from torchtitan.errors import DataError, reason_of
from torchtitan.logging import Waiting, logger

ARROW_FILE = b"ARROW1"  # begins a file with an index
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
    if isinstance(getattr(file, "raw", None), StoreFile):
        return nullcontext(file.read())
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


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


class TableFiles(RecordFiles):
    """Memory-mapped `pyarrow.Table`s: Arrow files, or the copy of Parquet files in the cache of `datasets`. The column
    holds text, tokens or, with a `Chat`, conversations. If the tables are `mapped_file`, each is the file itself, which
    therefore may not change."""

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        text_column: str,
        tables: Sequence[Any],
        mapped: bool,
        chat: Any = None,
    ) -> None:
        super().__init__(root, files)
        self.chat = chat
        self.text_column = text_column
        self.skipped = Skipped(self.name)
        self.mapped = mapped
        self.batches = [
            (number, batch) for number, table in enumerate(tables) for batch in table.to_batches() if batch.num_rows
        ]
        self.ends = np.cumsum([batch.num_rows for _, batch in self.batches])
        self.valid: set[int] = set()

    @property
    def fingerprint(self) -> str:
        return digest([self.named_sizes, len(self)])

    def __getitem__(self, index: int) -> Document:
        id = f"{self.name}[{index}]"
        place, row = self.locate(index)
        number, batch = self.batches[place]
        if self.mapped:
            with self.open(number):  # raises if it has changed
                pass
            if place not in self.valid:
                file = self.root / self.files[number]
                with (
                    refusing(file, "an Arrow file"),
                    Waiting(f"{file}: checking a batch of {batch.num_rows:,} records"),
                ):
                    validate(batch)
                self.valid.add(place)
        try:
            value = scalar_at(batch, self.text_column, row)
            tokens = getattr(value, "values", None)  # a list has this
            size = tokens.nbytes if tokens is not None else buffer.size if (buffer := buffer_of(value)) else 0
            LONGEST.check(size, f"{self.root / self.files[number]}: a record")
            if self.chat is not None:
                record = {name: batch.column(name)[row].as_py() for name in batch.schema.names}
                return self.skipped.document(id, partial(self.chat.tokens, column=self.text_column), record)
            if tokens is not None and tokens.null_count == 0:
                return self.skipped.document(id, without_marks, tokens.to_numpy())
            text = value.as_py() if tokens is None else None
            text = text.decode() if isinstance(text, bytes) else text
            reason = f"no text or tokens in column {self.text_column!r}"
        except UnicodeDecodeError as error:
            text, reason = None, f"not UTF-8: {error}"
        if text is None:
            self.skipped.add(id, reason)
        return Document(text or "", id)


def validate(batch: Any) -> None:
    """Raises an `ArrowInvalid` if values of a record batch would be read outside of the file, which ends the process.
    Texts that are not UTF-8 are left to who reads them."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def buffer_of(value: Any) -> Any:
    """The bytes of an Arrow value of text, which are not copied; None if it has none."""
    value = getattr(value, "value", value) if str(value.type).startswith("dictionary<") else value
    return value.as_buffer() if is_text(value.type) and value.is_valid else None


def scalar_at(batch: Any, column: str, row: int) -> Any:
    """The Arrow value of a column, or of a field within it (`a.b`)."""
    name, *fields = [column] if column in batch.schema.names else column.split(".")
    value = batch.column(name)[row]
    for field in fields:
        value = value[field]
    return value


@contextmanager
def refusing(path: Path, kind: str) -> Iterator[None]:
    """Context of opening a file with pyarrow, whose errors include OSErrors."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{path} is not {kind}, or is damaged ({reason_of(error)}).") from error


def open_jsonl(_: str, root: Path, files: Sequence[str], text_column: str, vocabulary: Vocabulary | None) -> JsonLines:
    """Files with one JSON object per line, or an array of them. With a vocabulary, they may hold token ids."""
    return JsonLines(root, files, text_column, vocabulary is not None, vocabulary and vocabulary.chat)


def open_parquet(
    path: str, root: Path, files: Sequence[str], text_column: str, vocabulary: Vocabulary | None
) -> TableFiles:
    """Parquet files; `path` names them in messages. With a vocabulary, their tokens may be read instead of text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = {}
    for name in files:
        with refusing(root / name, "a Parquet file"), pq.ParquetFile(root / name) as file:
            if file.metadata.num_rows:  # `datasets` cannot read a file without rows
                schemas[name] = file.schema_arrow
    text_column, columns, chat = columns_of(path, root, schemas, text_column, vocabulary)
    column, types = columns[0], [schema.field(columns[0]).type for schema in schemas.values()]

    import datasets

    datasets.disable_progress_bars()
    names = [glob.escape(str(root / name)) for name in schemas]  # `datasets` takes them for patterns
    # The content names the copy in the cache of `datasets`, which compares only paths and times.
    content = digest(samples_of([root / name for name in schemas]))
    options: dict[str, Any] = {"name": content, "data_files": names, "columns": columns}
    if len(set(types)) > 1 and chat is None:  # they would all be cast to the first file's type
        plain = next(as_plain(type) for type in types if not pa.types.is_null(type))
        options["features"] = datasets.Features.from_arrow_schema(pa.schema([pa.field(column, plain)]))
    try:
        with Waiting(f"{path}: copying its text or tokens into the cache of `datasets`"):
            dataset = datasets.load_dataset("parquet", split="train", **options)
    except Exception as error:  # `datasets` documents no exception classes for these failures
        raise DataError(f"{root} cannot be read as Parquet ({error}).") from error
    return TableFiles(root, files, text_column, [dataset.data.table], mapped=False, chat=chat)


def open_arrow(
    path: str, root: Path, files: Sequence[str], text_column: str, vocabulary: Vocabulary | None
) -> TableFiles:
    """Arrow files, as streams (`save_to_disk` and the cache of `datasets`) or with an index."""
    import pyarrow as pa

    tables = {}
    for name in files:
        with refusing(root / name, "an Arrow file"):
            content = pa.memory_map(str(root / name))
            # The other reader's process can die of a file, for which it is no exception.
            indexed = content.read(len(ARROW_FILE)) == ARROW_FILE
            content.seek(0)
            tables[name] = (pa.ipc.open_file if indexed else pa.ipc.open_stream)(content).read_all()
            tables[name].validate()
    schemas = {name: table.schema for name, table in tables.items() if table.num_rows}
    text_column, columns, chat = columns_of(path, root, schemas, text_column, vocabulary)
    selected = [table.select(columns if table.num_rows else []) for table in tables.values()]
    return TableFiles(root, files, text_column, selected, mapped=True, chat=chat)


def columns_of(
    path: str, root: Path, schemas: Mapping[str, Any], text_column: str, vocabulary: Vocabulary | None
) -> tuple[str, list[str], Any]:
    """The column of text, tokens or conversations; the column itself, or the record with that field, and for
    conversations those beside it; and the `Chat` for these. Raises a DataError if it holds nothing that is wanted."""
    if not schemas:
        raise DataError(f"{path} has no rows.")
    first, tokens, chat = next(iter(schemas.values())), vocabulary is not None, vocabulary and vocabulary.chat
    text_column = column_among(text_column, first.names, tokens, chat)
    chat = chat if is_messages(type_at(first, text_column)) or text_column == PROMPT else None
    usable = False
    for name, schema in schemas.items():
        type = type_at(schema, text_column)
        fits = is_text(type) or (tokens and is_tokens(type)) or (chat is not None and is_messages(type))
        if not fits and str(type) != "null":
            raise missing_column(str(root / name), text_column, [f"{f.name} ({f.type})" for f in schema])
        usable = usable or fits
    if not usable:
        raise DataError(f"{path} has no text in column {text_column!r}, only nulls.")
    column = text_column if text_column in first.names else text_column.split(".")[0]
    return text_column, [column, *(name for name in BESIDE if chat is not None and name in first.names)], chat


def is_messages(type: Any) -> bool:
    """Whether an Arrow type is a list of records with a role."""
    return str(type).startswith(("list<", "large_list<")) and "role: " in str(type.value_type)


def is_tokens(type: Any) -> bool:
    """Whether an Arrow type is a list of integers."""
    is_list = str(type).startswith(("list<", "large_list<", "fixed_size_list<"))
    return is_list and str(type.value_type).removeprefix("u") in ("int8", "int16", "int32", "int64")


def is_text(type: Any) -> bool:
    """Whether an Arrow type is text, or bytes that may be."""
    type = type.value_type if str(type).startswith("dictionary<") else type
    return str(type) in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def as_plain(type: Any) -> Any:
    """An Arrow type with one form of text and of tokens in place of others, for a cast of several forms to one."""
    import pyarrow as pa

    if pa.types.is_struct(type):
        return pa.struct([pa.field(field.name, as_plain(field.type)) for field in type])
    return pa.large_string() if is_text(type) else pa.list_(pa.int64()) if is_tokens(type) else type


def type_at(schema: Any, column: str) -> Any:
    """The Arrow type of a column, or of a field within it (`a.b`); None if it does not exist."""
    type = schema
    for name in [column] if column in schema.names else column.split("."):
        index = type.get_field_index(name) if hasattr(type, "get_field_index") else -1
        if index < 0:
            return None
        type = type.field(index).type
    return type
