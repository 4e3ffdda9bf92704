"""Opens a path or hub id as documents, according to what it names."""

import os
import re
from pathlib import Path

from torchtitan.data.records import JsonLines, ParquetFiles
from torchtitan.data.sources import Source, StreamedSource, TextFiles
from torchtitan.data.streamed import open_compressed_jsonl, open_hub
from torchtitan.errors import DataError, counted
from torchtitan.logging import logger

__all__ = ["open_path"]

JSONL, COMPRESSED, PARQUET = "JSONL", "compressed JSONL", "Parquet"
KINDS = {
    ".jsonl": JSONL,
    ".json": JSONL,
    ".ndjson": JSONL,
    ".gz": COMPRESSED,
    ".zst": COMPRESSED,
    ".parquet": PARQUET,
}
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(/[\w.-]+)?")
RECORDS = (JSONL, COMPRESSED, PARQUET)
PART_OF_DATA = 10  # a kind with less than a tenth of the bytes is not what the folder is for
NAMED_ASIDE = 5
ABOUT_DATA = {"readme", "license", "licence", "notice", "citation", "changelog", "dataset_info", "dataset_infos"}
LEFT_OUT = {"_SUCCESS"}  # written by Spark beside its output files


def open_path(path: str, text_column: str) -> Source | StreamedSource:
    """Documents of a JSON, Parquet or text file, of a folder of such files, or of a dataset on the Hub.

    Args:
        path: file, folder, or, if neither exists, `owner/name` or `owner/name/configuration`.
        text_column: the text field in JSON, Parquet and Hub datasets; `a.b` is field b of a.

    Raises:
        DataError: the path does not exist, is empty, has several kinds of files, or lacks the column.
    """
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            root, files = place, files_in(place)
        elif place.is_file():
            root, files = place.parent, [place.name]
        elif looks_like_hub_id(path):
            return open_hub(path, text_column)
        else:
            raise DataError(f"there is no file or folder {path}.")
        files = [name for name in files if (root / name).stat().st_size]
        if not files:
            raise DataError(f"{path} is empty.")
        return open_files(str(place), root, files, text_column)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read ({error.strerror}).") from error


def looks_like_hub_id(path: str) -> bool:
    """Whether this path, which does not exist as a file or folder, looks like a Hub id."""
    place = Path(path)
    of_a_file = place.suffix in KINDS or place.suffix == ".txt" or place.parent.is_dir()
    return HUB_ID.fullmatch(path) is not None and not of_a_file


def files_in(folder: Path) -> list[str]:
    """Names of all non-hidden files below a folder, in an order that is the same on every platform.

    Links to folders are followed, but not in circles.
    """
    names = []
    above = {folder: {folder.resolve()}}
    for inside, folders, files in os.walk(folder, followlinks=True):
        here = above.pop(Path(inside))
        kept = {name: (Path(inside) / name).resolve() for name in folders if not name.startswith(".")}
        folders[:] = [name for name, real in kept.items() if real not in here]
        above |= {Path(inside) / name: {*here, kept[name]} for name in folders}
        names += [
            (Path(inside) / name).relative_to(folder).as_posix()
            for name in files
            if not name.startswith(".") and name not in LEFT_OUT
        ]
    return sorted(names)


def open_files(path: str, root: Path, files: list[str], text_column: str) -> Source | StreamedSource:
    kind, files = data_among(path, root, files)
    if kind == JSONL:
        return JsonLines(root, files, text_column)
    if kind == PARQUET:
        return ParquetFiles(root, files, text_column)
    if kind == COMPRESSED:
        return open_compressed_jsonl(path, str(root), files, text_column)
    return TextFiles(root, files)


def data_among(path: str, root: Path, files: list[str]) -> tuple[str, list[str]]:
    """Chooses the data files, and their kind, by bytes. Logs the files that are skipped.

    Raises:
        DataError: there are several kinds of record files, each a large part of the bytes.
    """
    named = [name for name in files if Path(name).stem.lower() not in ABOUT_DATA] or files
    of_kind: dict[str, list[str]] = {}
    for name in named:
        of_kind.setdefault(kind_of(name), []).append(name)
    size = {kind: sum((root / name).stat().st_size for name in names) for kind, names in of_kind.items()}
    # Text files next to record files usually describe them, unless there is far more text.
    weight = {kind: bytes * (PART_OF_DATA if kind in RECORDS else 1) for kind, bytes in size.items()}
    kind, *others = sorted(of_kind, key=lambda kind: (-weight[kind], kind))
    if kind in RECORDS and any(size[other] * PART_OF_DATA > size[kind] for other in others if other in RECORDS):
        found = ", ".join(f"{len(of_kind[kind])} {kind}" for kind in (kind, *others))
        raise DataError(f"{path} holds files of several kinds ({found}); keep one kind per folder, or name one file.")
    aside = sorted(set(files) - set(of_kind[kind]))
    if aside:
        logger.info(
            f"{path}: reading {counted(len(of_kind[kind]), f'{kind} file')}; skipped: {', '.join(aside[:NAMED_ASIDE])}"
            + (f" and {len(aside) - NAMED_ASIDE} more" if len(aside) > NAMED_ASIDE else "")
        )
    return kind, of_kind[kind]


def kind_of(name: str) -> str:
    suffix = Path(name).suffix
    return KINDS.get(suffix.lower(), f"text ({suffix or 'no suffix'})")
