"""Data read sequentially through `datasets`: from the Hub, or compressed files. Shards are dealt to rows."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.records import LINES_LOOKED_AT, Skipped, check_columns, column_of, missing_column, text_of_line
from torchtitan.data.sources import Document, Drawn, Stamp, digest
from torchtitan.data.strided import mix64, permute_index
from torchtitan.errors import DataError
from torchtitan.logging import logger

__all__ = ["ShardedStream", "open_compressed_jsonl", "open_hub"]


class ShardedStream:
    """Shards of a streamed dataset, shuffled in each epoch and dealt to rows as complete shards.

    With fewer shards than rows, several rows read the same shard and each uses its own part of the documents.

    Args:
        dataset: a `datasets.IterableDataset`.
        name: for messages.
        identity: JSON that identifies the data.
        text_of: the text of a record; raises ValueError if there is none, and the record is skipped.
        root, files: of local data, the file of each shard, relative to a folder.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        identity: object,
        text_of: Callable[[dict[str, Any]], str],
        root: Path = Path(),
        files: Sequence[str] = (),
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.identity = identity
        self.text_of = text_of
        self.root = root
        self.files = files
        self.stamps = [Stamp.of(root / file) for file in files]
        self.skipped = Skipped(name)

    @property
    def fingerprint(self) -> str:
        return digest([self.identity, self.dataset.num_shards])

    def documents(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        shards = self.dataset.num_shards
        parts = -(-rows // shards)  # rows that share a shard, if there are too few
        # `number` documents of the shard have been read; `state` is where `datasets` resumes.
        epoch, place, number, state = position or (0, row, 0, None)
        found = position is not None
        while True:
            key = None if seed is None else mix64(mix64(seed) + epoch)
            while place < shards * parts:
                part, shard = divmod(place if key is None else permute_index(place, shards * parts, key), shards)
                for record, state_after in self.records(shard, state):
                    number += 1
                    if number % parts == part:
                        found = True
                        # The id decides what is held out, so it may not depend on where the files are.
                        where = self.files[shard] if self.files else f"{self.name}[{shard}]"
                        document = self.document(record, f"{where}:{number}")
                        yield Drawn(document, epoch, [epoch, place, number, state_after])
                place, number, state = place + rows, 0, None
            if not found:
                raise DataError(
                    f"{self.name} has too few documents for the {rows} rows of a global batch; "
                    "lower the batch size or add documents."
                )
            epoch, place, found = epoch + 1, row, False

    def records(self, shard: int, state: Any) -> Iterator[tuple[dict[str, Any], Any]]:
        """The records of a shard, each with the state after it; resumes from `state` if given."""
        if self.files:
            self.check_unchanged(shard)
        stream = self.dataset.shard(num_shards=self.dataset.num_shards, index=shard)
        if state is not None:
            stream.load_state_dict(state)
        records = iter(stream)
        while True:
            try:
                record = next(records, None)
            except Exception as error:  # from the network, a decoder or a parser; each library has its own classes
                raise DataError(f"{self.name}: cannot continue reading shard {shard} ({brief(error)}).") from error
            if record is None:
                return
            yield record, stream.state_dict()

    def check_unchanged(self, shard: int) -> None:
        path = self.root / self.files[shard]
        try:
            with path.open("rb") as file:
                self.stamps[shard].check(path, file)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error

    def document(self, record: dict[str, Any], id: str) -> Document:
        try:
            return Document(self.text_of(record), id)
        except ValueError as error:
            self.skipped.add(id, str(error))
            return Document("", id)


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def open_compressed_jsonl(name: str, root: str, files: Sequence[str], text_column: str) -> ShardedStream:
    """Compressed files with one JSON object per line; each file is a shard.

    Args:
        name: of the file or folder, for messages.
        root: folder that `files` are relative to.
    """
    import datasets

    datasets.disable_progress_bars()
    # Read as lines of text, so that an invalid JSON line only affects itself.
    paths = [f"{root}/{file}" for file in files]
    try:
        lines = datasets.load_dataset("text", data_files=paths, split="train", streaming=True)
        first = [record["text"] for record in itertools.islice(lines, LINES_LOOKED_AT)]
    except Exception as error:
        raise DataError(f"{name} cannot be read ({brief(error)}).") from error
    check_columns(name, text_column, first)
    sizes = [[file, (Path(root) / file).stat().st_size] for file in files]
    return ShardedStream(
        lines, name, sizes, lambda record: text_of_line(record["text"], text_column), Path(root), files
    )


def open_hub(path: str, text_column: str, part: str = "train") -> ShardedStream:
    """A dataset on the Hub, streamed.

    Args:
        path: `owner/name`, or `owner/name/configuration`.
        part: name of the split.
    """
    import datasets

    owner, name, *configuration = path.split("/")
    logger.info(f"opening {path} on the Hugging Face Hub")
    try:
        dataset = datasets.load_dataset(f"{owner}/{name}", *configuration, split=part, streaming=True)
        first = next(iter(dataset), None)
    except Exception as error:
        raise DataError(
            f"there is no file or folder {path}, and it cannot be opened as a data set on the Hub ({brief(error)}); "
            "check the spelling, the network, and HF_TOKEN or HF_HUB_OFFLINE if they are set."
        ) from error
    if first is None:
        raise DataError(f"the data set {path} on the Hub is empty.")
    if not isinstance(column_of(first, text_column), str):
        raise missing_column(path, text_column, sorted(first))

    def text_of(record: dict[str, Any]) -> str:
        text = column_of(record, text_column)
        if not isinstance(text, str):
            raise ValueError(f"no text in column {text_column!r}")
        return text

    return ShardedStream(dataset, path, path, text_of)
