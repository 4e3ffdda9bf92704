"""Opens a path or hub id as documents, according to what it names."""

import codecs
import errno
import glob
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchtitan.data.datasets import TRAIN, by_split, split_for
from torchtitan.data.sources import KEPT, LISTED, AnySource, Stamp, TextFiles, Vocabulary, file_system_of, head_of
from torchtitan.errors import DataError, counted
from torchtitan.files import any_path, is_remote, regular_file, store_errors
from torchtitan.logging import Waiting, logger
from torchtitan.registry import deferred, load

SHARDS = (".bin", ".npy", ".ds")
SIDECARS = {".idx": ".bin", ".ds.index": ".ds", ".ds.metadata": ".ds"}  # and the shard that they belong to
OF_DOLMA = ".csv.gz"  # beside a .npy: the places of its documents, and where they are from
METADATA = "metadata.json"  # `python -m torchtitan.tools.tokenize` writes it beside its shards.


class RecordFormat(NamedTuple):
    """A format of records."""

    suffixes: tuple[str, ...]  # endings of its files' names
    # Opens the documents, given the path that was named, the folder, names in it, the text column and the vocabulary
    # (None: only text is wanted).
    open: Callable[[str, Path, list[str], str, Vocabulary | None], AnySource]
    here: bool = False  # its library maps files of this machine, so files in object stores are copied


def open_tokens(path: str, root: Path, files: list[str], _: str, vocabulary: Vocabulary | None) -> AnySource:
    if vocabulary is None:
        raise DataError(
            f"{path} holds tokens, but evaluation.tasks (held_out, text:PATH), torchtitan.tools.tokenize and "
            "train_tokenizer.py read text; name the text that they were made of."
        )
    tokens: AnySource = load("torchtitan.data.shards:TokenFiles")(path, root, files, vocabulary)
    return tokens


RECORDS = {
    "JSONL": RecordFormat((".jsonl", ".json", ".ndjson", ".jsonlines"), deferred("torchtitan.data.records:open_jsonl")),
    "compressed JSONL": RecordFormat(
        (".gz", ".bz2", ".xz", ".zst"), deferred("torchtitan.data.streamed:open_compressed_jsonl")
    ),
    "Parquet": RecordFormat((".parquet",), deferred("torchtitan.data.tables:open_parquet"), here=True),
    "Arrow": RecordFormat((".arrow",), deferred("torchtitan.data.tables:open_arrow"), here=True),
    "token shard": RecordFormat(SHARDS, open_tokens),
}
SUFFIXES = {suffix: name for name, format in RECORDS.items() for suffix in format.suffixes}
NOT_TEXT = {".csv", ".tsv", ".pdf", ".rtf"}  # though all or much of it is characters
HEAD = 1 << 13  # bytes of a text file, to tell whether it is text

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(/[\w.-]+)?")
PART_OF_DATA = 10  # a format with less than a tenth of the bytes is not what the folder is for
NAMED_ASIDE = 5
ABOUT_DATA = {"readme", "license", "licence", "notice", "citation", "changelog", "dataset_info", "dataset_infos"}
OF_SAVE_TO_DISK = {"state.json", "dataset_dict.json"}  # beside the Arrow files of `datasets`
# Spark, Parquet, Delta Lake and Databricks write these beside data; _temporary holds copies of an unfinished job's.
OTHERS = {
    "MosaicML Streaming (MDS)": re.compile(r"\.mds(\.\w+)?$"),
    "LitData": re.compile(r"(^|/)chunk-\d+-\d+(\.\w+)?\.bin$"),
}
"""Programs that write an index.json, and their shards."""
LEFT_OUT = {"_SUCCESS", "_temporary", "_spark_metadata", "_delta_log", "_metadata", "_common_metadata"}
LEFT_OUT_PREFIXES = (".", "_committed_", "_started_")

SPLIT_TEXT = {"", ".txt", ".text", ".raw", ".tokens"}  # in a folder of code, test.py and train.py are no splits


def open_path(path: str, text_column: str, purpose: str = TRAIN, vocabulary: Vocabulary | None = None) -> AnySource:
    """Documents of a JSON, Parquet, Arrow, token or text file, of several, or of a data set on the Hub.

    Args:
        path: file, folder, pattern such as `folder/*.jsonl`, or URI of one in an object store, or, if none exists,
            `owner/name` or `owner/name/configuration`.
        text_column: the text field in records; `a.b` is field b of a.
        purpose: what the documents are for, if a folder holds several splits.
        vocabulary: of the run, for tokens; None: only text is wanted.

    Raises:
        DataError: the path does not exist, is empty, has several kinds of files, or lacks the column.
    """
    place = any_path(path)
    try:
        if is_remote(place):
            root, files = files_in_store(place)
        elif place.is_dir():
            root, files = place, files_in(place)
        elif place.exists():
            root, files = place.parent, [place.name]
        elif glob.has_magic(path):
            root, files = files_of_pattern(place)
        elif looks_like_hub_id(path):
            of_hub: AnySource = load("torchtitan.data.streamed:open_hub")(path, text_column, purpose, vocabulary)
            return of_hub
        else:
            raise DataError(f"there is no file or folder {path}.")
        # An index may announce tokens of an empty shard.
        files = [name for name in files if Stamp.of(regular_file(root / name)).size or name.endswith(SHARDS)]
        refuse_other_formats(path, files)
        files = without_sidecars(path, files)
        if not files:
            raise DataError(f"{path} is empty.")
        format, files = data_among(str(place), root, files)
        if root == place:
            files = for_purpose(str(place), format, files, purpose)
        if format in RECORDS and RECORDS[format].here and is_remote(root):
            if (size := sum(Stamp.of(root / name).size for name in files)) > KEPT.most:
                raise DataError(
                    f"{path} takes a copy of {size / 1e9:,.1f} GB in the cache folder, and training.cache_gb allows "
                    f"{KEPT.most / 1e9:,.1f}; raise it, or rewrite the files as JSONL, or copy them to this machine."
                )
            root = load("torchtitan.data.blocks:copied")(root, files)
        if format in RECORDS:
            return RECORDS[format].open(str(place), root, files, text_column, vocabulary)
        for name in Waiting.over(files, f"{path}: looking whether its files are text", "files"):
            check_text(root / name)
        return TextFiles(root, files)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read ({error.strerror}).") from error


def refuse_other_formats(path: str, files: Sequence[str]) -> None:
    """Raises a DataError that names the program, if the files are of a format that is not read here."""
    if any(Path(name).name == "index.json" for name in files):
        for program, shard in OTHERS.items():
            if name := next((name for name in files if shard.search(name)), None):
                raise DataError(
                    f"{path} holds shards of {program} ({name}, with an index.json), which are not read here; write "
                    "the documents as JSONL, Parquet or token shards."
                )


def looks_like_hub_id(path: str) -> bool:
    """Whether this path, which does not exist as a file or folder, looks like a Hub id."""
    place = Path(path)
    return HUB_ID.fullmatch(path) is not None and place.suffix not in {*SUFFIXES, ".txt"} and not place.parent.is_dir()


def files_of_pattern(pattern: Path) -> tuple[Path, list[str]]:
    """The folder above the first wildcard, and the files below it that match, or are in a folder that does."""
    root, parts = Path(), list(pattern.parts)
    while parts and (not glob.has_magic(parts[0]) or (root / parts[0]).exists()):  # a folder may be named run[1]
        root /= parts.pop(0)
    root = root.absolute()
    names: set[str] = set()
    for match in map(Path, glob.glob(str(Path(glob.escape(str(root)), *parts)), recursive=True)):
        inside = match.absolute().relative_to(root)
        names |= {(inside / name).as_posix() for name in files_in(match)} if match.is_dir() else {inside.as_posix()}
    if not names:
        raise DataError(f"no file matches {pattern}.")
    return root, sorted(names)


def is_left_out(name: str) -> bool:
    """Whether a file or folder, by its own name, is hidden, or is not data."""
    return name in LEFT_OUT or name.startswith(LEFT_OUT_PREFIXES)


def files_in(folder: Path) -> list[str]:
    """Names of all non-hidden files below a folder, in an order that is the same on every platform.

    Links to folders are followed, but not in circles.
    """
    names = []
    above = {folder: {folder.resolve()}}
    for inside, folders, files in os.walk(folder, followlinks=True):
        here = above.pop(Path(inside))
        kept = {name: (Path(inside) / name).resolve() for name in folders if not is_left_out(name)}
        folders[:] = [name for name, real in kept.items() if real not in here]
        above |= {Path(inside) / name: {*here, kept[name]} for name in folders}
        names += [(Path(inside) / name).relative_to(folder).as_posix() for name in files if not is_left_out(name)]
    return sorted(names)


def files_in_store(place: Path) -> tuple[Path, list[str]]:
    """For a file, folder or pattern in an object store: the folder that names are relative to, and the names of all
    non-hidden files. `Stamp.of` knows them from then on."""
    store, path = file_system_of(place)
    root, elements = place, path.split("/")
    with store_errors(place):
        store.invalidate_cache()
        infos = store.find(path, detail=True)
        if not infos and glob.has_magic(path):
            root = place.parents[len(elements) - 1 - [*map(glob.has_magic, elements)].index(True)]
            for match, info in store.glob(path, detail=True).items():
                infos |= {match: info} if info["type"] == "file" else store.find(match, detail=True)
        named = list(infos) == [path]
        root = place.parent if named else root
        base = file_system_of(root)[1]
        if not infos:
            store.ls(base)  # tells if there is no bucket, or no access to it
            raise FileNotFoundError(errno.ENOENT, "there is no such file or folder in the object store", str(place))
        # Consoles make an empty object `folder/` for a folder.
        infos = {file[len(base) + 1 :]: info or store.info(file) for file, info in infos.items() if file[-1] != "/"}
    if odd := next((name for name in infos if "" in name.split("/")), None):
        raise DataError(f"{place}: the name {odd!r} has an empty part (//), which no path has; rename it.")
    stamps = {name: Stamp.of_info(info) for name, info in infos.items() if info["type"] == "file"}
    LISTED.update({str(root / name): stamp for name, stamp in stamps.items()})
    hidden = {name for name in stamps if any(map(is_left_out, name.split("/")))}
    return root, sorted(stamps if named else set(stamps) - hidden)


def data_among(path: str, root: Path, files: list[str]) -> tuple[str, list[str]]:
    """Chooses the data files, and their format, by bytes. Logs the files that are skipped. Raises a DataError if
    several formats of records are each a large part of the bytes."""
    about = {name for name in files if Path(name).stem.lower() in ABOUT_DATA or Path(name).name in OF_SAVE_TO_DISK}
    of_format: dict[str, list[str]] = {}
    for name in [name for name in files if name not in about] or files:
        suffix = Path(name).suffix
        of_format.setdefault(SUFFIXES.get(suffix.lower(), f"text ({suffix or 'no suffix'})"), []).append(name)
    size = {format: sum(Stamp.of(root / name).size for name in names) for format, names in of_format.items()}
    # Text files next to record files usually describe them, unless there is far more text.
    weight = {format: bytes * (PART_OF_DATA if format in RECORDS else 1) for format, bytes in size.items()}
    format, *others = sorted(of_format, key=lambda format: (-weight[format], format))
    if format in RECORDS and any(size[other] * PART_OF_DATA > size[format] for other in others if other in RECORDS):
        counts = ", ".join(f"{len(of_format[format])} {format}" for format in (format, *others))
        raise DataError(f"{path} holds files of several kinds ({counts}); name one, or files of one kind by a pattern.")
    read = of_format[format]
    if aside := sorted(set(files) - set(read)):
        logger.info(f"{path}: reading {counted(len(read), f'{format} file')}; skipped: {first_names(aside)}")
    return format, read


def for_purpose(path: str, format: str, files: list[str], purpose: str) -> list[str]:
    """Of the files of a folder those that are for `purpose`, if their names tell. Logs which are left out."""
    of_split = by_split(files)
    prose = TRAIN in of_split and Path(files[0]).suffix.lower() in SPLIT_TEXT
    if None in of_split and not (format in RECORDS or prose):
        return files
    split, read = split_for(of_split, purpose) or ("", files)
    if aside := sorted(set(files) - set(read)):
        logger.info(
            f"{path}: only its {split} files are read, {len(read)} of {len(files)} ({first_names(read)}); "
            f"left out: {first_names(aside)}; to read others, name a file such as {path}/{aside[0]}, or a pattern"
            + (f"; as validation.dataset_path, {path} is its validation files" if purpose == TRAIN else "")
        )
    return read


def check_text(file: Path) -> None:
    """Raises a DataError if a file is not text, by its suffix or its first bytes."""
    head = head_of(file, HEAD)
    reason = f"it is a {file.suffix} file" if file.suffix.lower() in NOT_TEXT else ""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD)
        reason = reason or (f"byte {head.index(0)} is zero" if 0 in head else "")
    except UnicodeDecodeError as error:
        reason = reason or f"byte {error.start} cannot be decoded"
    if reason:
        raise DataError(
            f"{file} is not UTF-8 text: {reason}; rewrite it as text, JSONL or Parquet, or remove it, or name "
            f"other files by a pattern such as {file.parent}/*.txt."
        )


def first_names(names: Sequence[str]) -> str:
    more = len(names) - NAMED_ASIDE
    return ", ".join(names[:NAMED_ASIDE]) + (f" and {more} more" if more > 0 else "")


def without_sidecars(path: str, files: Sequence[str]) -> list[str]:
    """File names without indices and notes of token shards. Raises a DataError if a shard is missing."""
    kept = []
    shards = any(name.endswith(SHARDS) for name in files)
    for name in files:
        if name.endswith(OF_DOLMA) and name.removesuffix(OF_DOLMA) + ".npy" in files:
            continue
        ending = next((ending for ending in SIDECARS if name.endswith(ending)), "")
        if ending and (shard := name.removesuffix(ending) + SIDECARS[ending]) not in files:
            raise DataError(f"{path} holds {name} without {shard}, which it is about; add and name that file.")
        if not ending and not (shards and Path(name).name == METADATA):
            kept.append(name)
    return kept
