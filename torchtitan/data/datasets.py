"""Data sets by name, path or hub id, their splits and held-out parts. Imports neither torch nor `datasets`."""

import glob
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.config.training import Training, Validation
from torchtitan.data.packing import StridedSource, Weighted, is_remote_source
from torchtitan.data.sources import (
    KEPT,
    LARGEST_SEGMENT,
    LONGEST,
    AnySource,
    Document,
    Drawn,
    Source,
    StreamedSource,
    TextFiles,
    Vocabulary,
    digest,
    python_stdlib,
    samples_of,
)
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError, counted, without_secrets
from torchtitan.files import is_uri
from torchtitan.registry import Registry, deferred

open_path: Callable[..., AnySource] = deferred("torchtitan.data.paths:open_path")
open_hub: Callable[..., AnySource] = deferred("torchtitan.data.streamed:open_hub")
_chat_for: Callable[..., object] = deferred("torchtitan.data.conversations:chat_for")

TRAIN, VALIDATION, TEST = "training", "validation", "test"

# Words that `datasets`, too, takes for splits.
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "heldout", "holdout"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), TEST),
}
# The splits for each purpose: the first that exists is read. None: what has no split in its name.
WANTED: dict[str, tuple[str | None, ...]] = {TRAIN: (TRAIN, None), VALIDATION: (VALIDATION, TEST, None)}

# (training.dataset_path or None, training.text_column) -> documents
OpenDataset = Callable[["str | None", str], AnySource]


# What a name opens when no path is set; with a path, every one of these names opens the path.
BUILT_IN: dict[str, OpenDataset] = {
    "python_stdlib": lambda path, text_column: python_stdlib(),
    "c4": lambda path, text_column: open_path("allenai/c4/en", text_column),
    "c4_validation": lambda path, text_column: open_hub("allenai/c4/en", text_column, VALIDATION),
}
DATASETS: Registry[OpenDataset] = Registry("data set", "training.dataset", {**BUILT_IN})

HUB_REVISION = re.compile(r"hf://(datasets/|spaces/|models/)?[^/@]+/[^/@]+@[^/@]+")

Opened = tuple[str, AnySource, float]  # name, source, weight

MOST_COMPARED = 100  # files whose content a resume compares; evenly spread ones of more
HELD_OUT_EVERY = 100  # one document in this many is held out
SEGMENTS_PER_ROW = 8
BYTES_PER_SEGMENT_TOKEN = 16  # times seq_len: about four sequences, at 3 to 4 bytes a token


def vocabulary_of(tokenizer: Tokenizer | None, training: Training) -> Vocabulary | None:
    """What token shards are read with; None: they cannot be."""
    if tokenizer is None:
        return None
    key, size = training.token_separator, tokenizer.vocab_size
    if key is not None and key >= size:
        raise DataError(
            f"training.token_separator = {key} is no token of the tokenizer, whose ids are 0 to {size - 1}."
        )
    ids = [id for id in (tokenizer.eos_id, tokenizer.bos_id) if id is not None]
    ends = (tokenizer.bos_id, tokenizer.eos_id if tokenizer.add_eos else None)
    separators = ids if key is None else [key] if key >= 0 else []
    chat = _chat_for(tokenizer, training) if training.train_on else None
    return Vocabulary(size, tokenizer.ids_fingerprint, separators, training.token_dtype, ends, chat)


def open_named(
    key: str, name: str, path: str | None, text_column: str, purpose: str = TRAIN, vocabulary: Vocabulary | None = None
) -> AnySource:
    """Opens a registered data set, from `path` if given. Errors begin with the key at fault."""
    open_dataset = DATASETS.get(name, key)
    try:
        if path is not None and name in BUILT_IN:
            return open_path(path, text_column, purpose, vocabulary)
        return open_dataset(path, text_column)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def open_name_or_path(
    key: str, name: str, text_column: str, purpose: str = TRAIN, vocabulary: Vocabulary | None = None
) -> AnySource:
    # Every built-in data set can open any path.
    name, path = (name, None) if name in DATASETS.names() else ("python_stdlib", name)
    return open_named(key, name, path, text_column, purpose, vocabulary)


def documents_of(name_or_path: str, text_column: str, key: str = "dataset", part: str = TRAIN) -> Iterator[Document]:
    """All documents of a data set, once, in storage order. Errors begin with the key at fault."""
    return documents_in(open_name_or_path(key, name_or_path, text_column, part))


def documents_in(source: AnySource) -> Iterator[Document]:
    """All documents of a source, once, in storage order."""
    if hasattr(source, "__getitem__"):
        return (source[index] for index in range(len(source)))  # type: ignore[arg-type]
    drawn = source.documents(row=0, rows=1, seed=None, position=None)
    return (document for document, _, _ in takewhile(lambda document: document.epoch == 0, drawn))


def set_bounds(training: Training) -> None:
    """For all sources of this process."""
    KEPT.most, LONGEST.size = int(training.cache_gb * 1e9), int(training.max_document_mb * 1e6)


def open_training(training: Training, tokenizer: Tokenizer | None) -> list[Opened]:
    set_bounds(training)
    vocabulary = vocabulary_of(tokenizer, training)
    if not training.dataset_mixture:
        key = "training.dataset" if training.dataset_path is None else "training.dataset_path"
        source = open_named(key, training.dataset, training.dataset_path, training.text_column, vocabulary=vocabulary)
        return [(without_secrets(training.dataset_path or training.dataset), source, 1.0)]
    key = "training.dataset_mixture"
    entries = map(parse_entry, training.dataset_mixture)
    return [
        (
            name or without_secrets(path),
            open_name_or_path(key, path, column or training.text_column, vocabulary=vocabulary),
            weight,
        )
        for path, column, name, weight in entries
    ]


def parse_entry(entry: str) -> tuple[str, str, str, float]:
    """Data set or path, column, name for logs and metrics, and weight of a mixture entry; "" for what it lacks."""
    path, _, number = entry.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        path = ""
    if not path or not 0 < weight < float("inf"):
        raise DataError(
            f"training.dataset_mixture: {entry!r} is not `name or path:weight` with a weight above 0, "
            "such as `python_stdlib:0.7`, or `path#column:weight`; `path@name:weight` names a source in metrics."
        )
    path, name = (path, "") if HUB_REVISION.fullmatch(path) else cut_mark(path, "@")
    path, column = cut_mark(path, "#")
    return path, column, name, weight


def cut_mark(path: str, mark: str) -> tuple[str, str]:
    """`path` up to the last mark, and the rest; but a mark in a folder's name, an existing path or a pattern that
    matches something stays, and one without which nothing is there either: a folder's name may end with it."""
    before, _, after = path.rpartition(mark)
    named = before.startswith(("/", "~", "."))
    belongs = "/" in after or (not is_uri(path) and (is_there(path) or (named and not is_there(before))))
    return (before, after) if before and after and not belongs else (path, "")


def is_there(path: str) -> bool:
    path = os.path.expanduser(path)
    return os.path.exists(path) or any(glob.iglob(path))


def for_rows(source: AnySource, rows: int, seq_len: int) -> AnySource:
    """The source, in documents that can be dealt to the rows of a batch: text files in segments small enough that one
    medium file can feed all rows, and a row moves on to other text after a few sequences."""
    if not isinstance(source, TextFiles):
        return source
    return source.cut(SEGMENTS_PER_ROW * rows, min(BYTES_PER_SEGMENT_TOKEN * seq_len, LARGEST_SEGMENT))


def as_rows(
    opened: Sequence[Opened], rows: int, seq_len: int, places: Mapping[str, int] | None = None
) -> list[Weighted]:
    """Sources that can be dealt to the rows of a batch. `places`: of sources by their ids; default: their order."""
    weighted = []
    for index, (id, (name, source, weight)) in enumerate(zip(ids_of(opened), opened, strict=True)):
        source = for_rows(source, rows, seq_len)
        streamed = StridedSource(source, name) if hasattr(source, "__getitem__") else source  # type: ignore[arg-type]
        weighted.append(Weighted(streamed, name, weight, id, places[id] if places else index))
    return weighted


def ids_of(opened: Sequence[Opened]) -> list[str]:
    """An id for each source: a second one with the same documents has another."""
    prints = [source.fingerprint for _, source, _ in opened]
    return [f"{print} {prints[:place].count(print)}" for place, print in enumerate(prints)]


class DataOfRun(NamedTuple):
    """What the data of all stages of a run have in common."""

    rows: int  # that documents are dealt to: a common multiple of all global batch sizes
    seq_len: int  # the first stage's
    hold_out: bool  # leave out the documents that `validation_sources` uses if it has no data set of its own
    places: Mapping[str, int] | None = None  # source id -> place among all stages' sources; None: one stage


def places_of_sources(stages: Sequence[Training], tokenizer: Tokenizer | None, hold_out: bool) -> dict[str, int]:
    """The place of each source among all stages' sources. Opens them all."""
    opened = [open_training(stage, tokenizer) for stage in stages]
    ids = itertools.chain(*(ids_of(divided(sources, False) if hold_out else sources) for sources in opened))
    return {id: place for place, id in enumerate(dict.fromkeys(ids))}


def divided(opened: Sequence[Opened], held_out: bool) -> list[Opened]:
    """The held-out parts of sources, or else their training parts."""
    return [(name, split_held_out(source, held_out, name), weight) for name, source, weight in opened]


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


def _content(source: AnySource) -> list[str]:
    """Samples of at most `MOST_COMPARED` files of a source: names and sizes may stay when a file is made anew."""
    root, files = getattr(source, "root", None), getattr(source, "files", ())
    return [] if root is None else samples_of([root / name for name in files], MOST_COMPARED)


def training_sources(
    training: Training, run: DataOfRun, tokenizer: Tokenizer | None = None
) -> tuple[list[Weighted], dict[str, object]]:
    """The training sources, and, as JSON, the identity of the data (before any documents are held out). `tokenizer` is
    the run's, for sources that hold tokens."""
    opened = open_training(training, tokenizer)
    data = digest([[source.fingerprint, weight] for _, source, weight in opened])
    contents = [_content(source) for _, source, _ in opened]
    content = digest(contents) if all(any(samples) for samples in contents) else ""  # unknown
    # Text without documents is cut into some whose length depends on the first stage's sequences.
    cut = run.seq_len if any(isinstance(source, TextFiles) for _, source, _ in opened) else None
    trained = divided(opened, False) if run.hold_out else opened
    return as_rows(trained, run.rows, run.seq_len, run.places), {"data": data, "content": content, "cut_for": cut}


def validation_sources(
    validation: Validation, training: Training, rows: int, tokenizer: Tokenizer | None = None
) -> list[Weighted]:
    """The validation sources: the validation set, or one document in a hundred of the training set."""
    opened = open_validation(validation, training, tokenizer)
    if validation.dataset is None and validation.dataset_path is None:
        opened = [(f"held-out part of {name}", source, weight) for name, source, weight in opened]
    return as_rows(opened, rows, training.seq_len)


def held_out_documents(validation: Validation, training: Training) -> list[tuple[str, Iterator[Document]]]:
    """The name of each validation source, and its documents, once, in storage order."""
    return [(name, documents_in(source)) for name, source, _ in open_validation(validation, training)]


def open_validation(validation: Validation, training: Training, tokenizer: Tokenizer | None = None) -> list[Opened]:
    if validation.dataset is None and validation.dataset_path is None:
        return divided(open_training(training, tokenizer), True)
    set_bounds(training)
    key = "validation.dataset" if validation.dataset_path is None else "validation.dataset_path"
    dataset, vocabulary = validation.dataset or "python_stdlib", vocabulary_of(tokenizer, training)
    source = open_named(key, dataset, validation.dataset_path, validation.text_column, VALIDATION, vocabulary)
    return [(without_secrets(validation.dataset_path or dataset), source, 1.0)]


def split_of(name: str) -> str | None:
    """The split that the name of a file, or else of a folder around it, tells; None if it tells none, or several."""
    for element in reversed(Path(name).parts):
        if splits := {SPLITS[word] for word in re.findall(r"[a-z]+", element.lower()) if word in SPLITS}:
            return splits.pop() if len(splits) == 1 else None
    return None


def by_split(names: Iterable[str]) -> dict[str | None, list[str]]:
    """The names of each split."""
    of_split: dict[str | None, list[str]] = {}
    for name in names:
        of_split.setdefault(split_of(name), []).append(name)
    return of_split


def split_for(of_split: dict[str | None, list[str]], purpose: str) -> tuple[str, list[str]] | None:
    """For `purpose`, TRAIN or VALIDATION: what to call the split that is read, and its names. None: none is for it."""
    return next(((split or "unmarked", of_split[split]) for split in WANTED[purpose] if split in of_split), None)
