"""Random-access sources whose documents are records with a text column: JSONL and Parquet files."""

import json
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchtitan.data.index import Records, record_offsets
from torchtitan.data.sources import Document, Stamp, digest
from torchtitan.errors import DataError
from torchtitan.logging import logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["JsonLines", "ParquetFiles", "Skipped", "check_columns", "text_of_line"]

LINES_LOOKED_AT = 20  # of each file, to check that the column exists
LONGEST_LINE_LOOKED_AT = 1 << 26  # bytes
SKIPS_LOGGED_SINGLY = 5
ARRAY_LOOKED_AT = 1 << 12  # bytes
STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)


class Skipped:
    """Counts unusable records, and logs them: the first few individually, then at 10, 100, 1000, ...

    Attributes:
        count: so far, in this process. A record is counted again in each epoch.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if self.count <= SKIPS_LOGGED_SINGLY:
            logger.warning(f"{self.name}: skipped {where} ({reason})")
        elif str(self.count).strip("0") == "1":
            logger.warning(f"{self.name}: {self.count} records skipped so far")


def text_of_line(line: bytes | str, text_column: str) -> str:
    """The text in a line of JSON. Raises ValueError, with the reason, if there is none."""
    record = parsed(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    text = column_of(record, text_column)
    if not isinstance(text, str):
        raise ValueError(f"no text in column {text_column!r}")
    return replace_surrogates(text)


def column_of(record: dict[str, Any], column: str) -> Any:
    """The value of a column. `a.b` is field b of record a, unless the record has a column named `a.b`."""
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def parsed(line: bytes | str) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def replace_surrogates(text: str) -> str:
    """Replaces unpaired surrogates: JSON can contain them, but they are not characters and tokenizers reject them."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_columns(name: str, text_column: str, lines: Iterable[bytes | str]) -> None:
    """Raises a DataError unless one of these first lines has the column."""
    columns: set[str] = set()
    last_error = ValueError("it has no lines")
    for line in lines:
        try:
            text_of_line(line, text_column)
            return
        except ValueError as error:
            last_error = error
        try:
            record = parsed(line)
            columns.update(record if isinstance(record, dict) else ())
        except ValueError:
            pass
    if columns:
        raise missing_column(name, text_column, sorted(columns))
    raise DataError(f"{name} is not JSONL, one JSON object per line ({last_error}).")


def missing_column(name: str, text_column: str, columns: Sequence[str]) -> DataError:
    return DataError(
        f"{name} has no text column {text_column!r}; its columns are {', '.join(columns)}: "
        "set training.text_column (or validation.text_column) to the one that holds the text."
    )


class JsonLines:
    """Files with one JSON object per line, or an array of objects. Unusable records are counted, logged and skipped.

    Args:
        root: folder that names in ids and in `fingerprint` are relative to.
        files: names relative to `root`.
        text_column: key of the text.
    """

    def __init__(self, root: Path, files: Sequence[str], text_column: str) -> None:
        import numpy as np

        self.root = root
        self.files = files
        self.text_column = text_column
        self.skipped = Skipped(root.name if len(files) > 1 else files[0])
        self.arrays = [is_array(root / name) for name in files]
        self.stamps = [Stamp.of(root / name) for name in files]
        for name, array in zip(files, self.arrays, strict=True):
            if not array:
                check_columns(str(root / name), text_column, first_lines(root / name))
        arrays = [number for number, array in enumerate(self.arrays) if array]
        self.offsets = record_offsets(Records(root, files, self.stamps, arrays, array_offsets))
        self.ends = np.cumsum([len(offsets) - 1 for offsets in self.offsets])
        for number in arrays:
            first = (self.read(number, record) for record in range(min(len(self.offsets[number]) - 1, LINES_LOOKED_AT)))
            check_columns(str(root / files[number]), text_column, first)

    @property
    def fingerprint(self) -> str:
        return digest([[name, int(offsets[-1])] for name, offsets in zip(self.files, self.offsets, strict=True)])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Document:
        file = int(self.ends.searchsorted(index, side="right"))
        line = index - (int(self.ends[file - 1]) if file else 0)
        id = f"{self.files[file]}:{line + 1}"
        content = self.read(file, line)
        try:
            return Document(text_of_line(content, self.text_column) if content.strip() else "", id)
        except ValueError as error:
            self.skipped.add(id, str(error))
            return Document("", id)

    def read(self, file: int, line: int) -> bytes:
        """The bytes of a record in a file."""
        start, stop = (int(offset) for offset in self.offsets[file][line : line + 2])
        path = self.root / self.files[file]
        try:
            with path.open("rb") as opened:
                self.stamps[file].check(path, opened)
                opened.seek(start)
                content = opened.read(stop - start)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error
        # Array elements are followed by a comma, and the last one by the closing bracket.
        return content.rstrip(b" \t\r\n,]") if self.arrays[file] else content


def is_array(path: Path) -> bool:
    """Whether a JSON file begins with the bracket of an array of objects, or of an empty array."""
    with path.open("rb") as file:
        return re.match(rb"\s*\[\s*[{\]]", file.read(ARRAY_LOOKED_AT)) is not None


def array_offsets(path: Path) -> "NDArray[np.int64]":
    """(records + 1) int64: the start of each object of an array, and the end of the file."""
    import numpy as np

    starts, depth = [], 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for found in STRING_OR_BRACKET.finditer(content):
            match found[0][:1]:
                case b"{" | b"[":
                    if depth == 1:
                        starts.append(found.start())
                    depth += 1
                case b"}" | b"]":
                    depth -= 1
        return np.array([*starts, len(content)], np.int64)


def first_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for _ in range(LINES_LOOKED_AT):
            if (line := file.readline(LONGEST_LINE_LOOKED_AT)).strip():
                yield line


class ParquetFiles:
    """Parquet files, read through the memory-mapped copy in the `datasets` cache.

    Args:
        root: folder that names in ids and in `fingerprint` are relative to.
        files: names relative to `root`.
        text_column: name of the string column.
    """

    def __init__(self, root: Path, files: Sequence[str], text_column: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for name in files:
            try:
                schema = pq.read_schema(root / name)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{root / name} is not a Parquet file, or is damaged ({error}).") from error
            if not any(is_text(pa, type) for type in types_at(pa, schema, text_column)):
                raise missing_column(str(root / name), text_column, [f"{f.name} ({f.type})" for f in schema])

        import datasets

        datasets.disable_progress_bars()
        self.files = files
        self.sizes = [(root / name).stat().st_size for name in files]
        self.text_column = text_column
        self.name = root.name if len(files) > 1 else files[0]
        self.skipped = Skipped(self.name)
        paths = [str(root / name) for name in files]
        column = text_column if text_column in schema.names else text_column.split(".")[0]
        try:
            self.dataset = datasets.load_dataset("parquet", data_files=paths, split="train", columns=[column])
        except Exception as error:  # `datasets` documents no exception classes for these failures
            raise DataError(f"{root} cannot be read as Parquet ({error}).") from error

    @property
    def fingerprint(self) -> str:
        return digest([list(zip(self.files, self.sizes, strict=True)), len(self.dataset)])

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Document:
        id = f"{self.name}[{index}]"
        try:
            text = column_of(self.dataset[index], self.text_column)
            reason = f"no text in column {self.text_column!r}"
        except UnicodeDecodeError as error:
            text, reason = None, f"not UTF-8: {error}"
        if text is None:
            self.skipped.add(id, reason)
        return Document(text or "", id)


def is_text(pa: ModuleType, type: Any) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type))


def types_at(pa: ModuleType, schema: Any, column: str) -> list[Any]:
    """The Arrow type of a column, or of a field within it (`a.b`); empty if it does not exist."""
    if column in schema.names:
        return [schema.field(column).type]
    fields: Any = schema
    for name in column.split("."):
        index = fields.get_field_index(name) if fields is schema or pa.types.is_struct(fields) else -1
        if index < 0:
            return []
        fields = fields.field(index).type
    return [fields]
