"""Tables of records: Parquet and Arrow files, read by row through a memory map."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.records import BESIDE, PROMPT, RecordFiles, Skipped, column_among, missing_column
from torchtitan.data.sources import LONGEST, Document, Vocabulary, digest, samples_of, without_marks
from torchtitan.errors import DataError, reason_of
from torchtitan.logging import Waiting

ARROW_FILE = b"ARROW1"  # begins a file with an index


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
