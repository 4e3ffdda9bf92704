"""Data that can only be read in sequence: from the Hub, or compressed files. Documents are dealt to rows one by one."""

import bisect
import copy
import importlib
import io
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchtitan.data.blocks import AHEAD
from torchtitan.data.datasets import TRAIN, by_split, split_for
from torchtitan.data.packing import mix64, permute_index
from torchtitan.data.records import (
    LINES_LOOKED_AT,
    Skipped,
    check_columns,
    column_among,
    column_in,
    column_of,
    content_of_line,
    is_conversation,
    missing_column,
    require_utf_8,
)
from torchtitan.data.sources import LONGEST, DataFiles, Drawn, Tokens, Vocabulary, digest, position_from
from torchtitan.errors import CheckpointError, DataError
from torchtitan.logging import Waiting, logger

SHARDS_AT_ONCE = 8  # shuffled shards open together, so that a batch mixes several; each open one costs memory
MOST_WAITING = 1 << 28  # bytes of documents that have been read and whose rows do not need them yet
CONTENT_AT_ONCE = 1 << 20  # bytes
COMPRESSED_AT_ONCE = 1 << 10  # bytes, of which Zstandard can make 32 MB
DOCUMENTS_PER_STATE = 100  # `datasets` takes 20 us to copy its state

# Reads a shard from after document `number`, which was read with `state`: each document with the state after it.
ReadShard = Callable[[int, int, Any], Iterator[tuple[Any, Any]]]


class OpenShard(NamedTuple):
    """A shard that is being read."""

    place: int  # its index in the order of this epoch
    read: int  # number of its documents read
    state: Any  # what its reader resumes from


class Place(NamedTuple):
    """Where a stream resumes."""

    epoch: int  # how often all shards have been read
    number: int  # documents dealt, in all epochs
    opened: int  # shards in this epoch
    shards: Sequence[OpenShard]

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"shards": [shard._asdict() for shard in self.shards]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Place":
        place = position_from(cls, values)
        return place._replace(shards=[position_from(OpenShard, shard) for shard in place.shards])


class RecordsState(NamedTuple):
    """What `datasets` resumes a shard from."""

    read: int  # number of its records read
    state: Any  # of the `datasets.IterableDataset` then


class Read(NamedTuple):
    """A document, as read, its id, and the place after it."""

    content: Any
    id: str
    place: Place


@dataclass(eq=False)
class ShardedStream:
    """Shards that can only be read in sequence. Each document of all shards is dealt to one row, once in an epoch.

    In each epoch the shards are shuffled, and several are open at once; each document is the next of an open shard,
    chosen at random in proportion to their sizes. Each block of `rows` documents of this stream gives one to each row,
    rotated by a random number: otherwise a row could get all long documents of periodic data. The stream goes on over
    the end of an epoch, so `rows` need not divide the number of documents.

    The rows of a process share one reader, as long as they stay near each other.
    """

    shards: Sequence[str]  # the name of each, for ids
    sizes: Sequence[int]  # sizes of the shards, in any unit
    read: ReadShard
    # The text of a document as read, or its token ids; raises ValueError if there is none, to skip the document.
    text_of: Callable[[Any], str | Tokens]
    name: str  # for messages
    identity: object  # JSON that identifies the data
    wanted: Callable[[str], object] = bool  # whether a document is, by its id
    root: Path | None = None  # the folder of `files`, if the shards are files
    files: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.skipped = Skipped(self.name)
        self.dealer: Dealer | None = None

    @property
    def fingerprint(self) -> str:
        return digest([self.identity, len(self.shards)])

    def only(self, wanted: Callable[[str], object], name: str) -> "ShardedStream":
        """The documents whose id is wanted, dealt as if there were no others; `name` is for messages."""
        subset = copy.copy(self)  # the copy counts what is skipped together with the whole
        subset.wanted, subset.name, subset.dealer = wanted, name, None
        return subset

    def documents(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        if isinstance(position, list):
            raise CheckpointError(
                f"{self.name}: the checkpoint is from version 0.1, which gave whole shards to rows; restart the data "
                "with --checkpoint.exclude_from_loading=dataloader."
            )
        dealer = self.dealer
        if dealer is None or row in dealer.places or (dealer.rows, dealer.seed) != (rows, seed):
            dealer = self.dealer = Dealer(self, rows, seed)
        dealer.places[row] = None if position is None else Place.from_json(position)
        return self.endless(dealer, row)

    def endless(self, dealer: "Dealer", row: int) -> Iterator[Drawn]:
        while True:
            content, id, place = dealer.draw(row)
            yield Drawn(self.skipped.document(id, self.text_of, content), place.epoch, place.to_json())

    def stream(self, rows: int, seed: int | None, start: Place | None) -> Iterator[Read]:
        """All documents, endlessly, from `start`."""
        epoch, number, opened, shards = start or Place(0, 0, 0, ())
        places = [*shards]
        begun = None if opened else number  # number of documents before this epoch, if it is read from its start
        while True:
            key = None if seed is None else mix64(mix64(seed) + epoch)
            order = [p if key is None else permute_index(p, len(self.shards), key) for p in range(len(self.shards))]
            if not opened:
                opened = 1 if key is None else min(SHARDS_AT_ONCE, len(order))
                places = [OpenShard(place, 0, None) for place in range(opened)]
            open_shards = [self.read(order[place], count, state) for place, count, state in places]
            while places:
                turn = chosen([self.sizes[order[place]] for place, _, _ in places], mix64((key or 0) + number))
                place, count, _ = places[turn]
                if (document := next(open_shards[turn], None)) is not None:
                    content, state = document
                    places[turn] = OpenShard(place, count + 1, state)
                    # The id decides what is held out, so it may not depend on where the files are.
                    id = f"{self.shards[order[place]]}:{count + 1}"
                    if self.wanted(id):
                        number += 1
                        yield Read(content, id, Place(epoch, number, opened, tuple(places)))
                elif opened < len(order):
                    places[turn], open_shards[turn] = OpenShard(opened, 0, None), self.read(order[opened], 0, None)
                    opened += 1
                else:
                    del places[turn], open_shards[turn]
            if begun is not None and number - begun < rows:
                raise DataError(
                    f"{self.name} has too few documents ({number - begun}) for the {rows} rows of a global batch; "
                    "lower the batch size or add documents."
                )
            begun, epoch, opened = number, epoch + 1, 0


def chosen(sizes: Sequence[int], number: int) -> int:
    """Which of several parts contains `number`, modulo their sum."""
    ends = list(itertools.accumulate(sizes))
    return bisect.bisect(ends, number % ends[-1])


@dataclass
class StreamReader:
    """A stream that is read once for several rows."""

    documents: Iterator[Read]
    after: dict[int, int]  # for each row, how many documents at the start of the stream it has had already
    waiting: dict[int, deque[Read]]  # for each row, its documents that were read and not drawn yet
    size: int = 0  # bytes of all those


@dataclass
class Dealer:
    """Deals a stream to the rows of one process, and reads it as few times as the memory for waiting documents allows.

    What a row gets does not depend on the other rows that are served.
    """

    source: ShardedStream
    rows: int
    seed: int | None
    places: dict[int, Place | None] = field(default_factory=dict)  # places of the rows that are served
    readers: dict[int, StreamReader] = field(default_factory=dict)  # readers of some of these rows

    def draw(self, row: int) -> Read:
        """The next document of a row."""
        if row not in self.readers:
            self.start()
        reader = self.readers[row]
        waiting = reader.waiting[row]
        while not waiting:
            if reader.size > MOST_WAITING:
                self.release_slowest(reader)
            read = next(reader.documents)
            number = read.place.number - 1
            dealt_to = (number + mix64(number // self.rows)) % self.rows
            if dealt_to in reader.waiting and number >= reader.after[dealt_to]:
                reader.waiting[dealt_to].append(read)
                reader.size += sys.getsizeof(read.content)
        read = waiting.popleft()
        reader.size -= sys.getsizeof(read.content)
        self.places[row] = read.place
        return read

    def start(self) -> None:
        """Starts a reader for all rows without one, at the first document that any of them needs."""
        resumed = {row: place for row, place in self.places.items() if row not in self.readers}
        after = {row: place.number if place else 0 for row, place in resumed.items()}
        start = resumed[min(after, key=lambda row: after[row])]
        documents = self.source.stream(self.rows, self.seed, start)
        reader = StreamReader(documents, after, {row: deque() for row in after})
        self.readers |= dict.fromkeys(after, reader)

    def release_slowest(self, reader: StreamReader) -> None:
        """Takes the row with the most waiting documents from a reader. It will get another reader."""
        sizes = {row: sum(sys.getsizeof(read.content) for read in reads) for row, reads in reader.waiting.items()}
        slowest = max(sizes, key=lambda row: sizes[row])
        reader.size -= sizes[slowest]
        del reader.waiting[slowest], self.readers[slowest]


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


class FramedFile(io.RawIOBase):
    """The content of a Zstandard or xz file. It may have several frames: `zstandard.open` reads the first, and takes a
    truncated file for a complete one; `lzma.open` does not bear the zeros that may follow each.

    Args:
        new_frame: makes what decompresses a frame.
        padding: bytes that may stand between and after frames.
    """

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any], padding: bytes = b"") -> None:
        self.new_frame, self.padding = new_frame, padding
        self.file = file
        self.frame: Any = None
        self.compressed, self.content = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.content:
            self.compressed = self.compressed or self.file.read(COMPRESSED_AT_ONCE)
            if self.frame is None and self.padding and self.compressed:
                if not (stripped := self.compressed.lstrip(self.padding)):
                    self.compressed = b""
                    continue
                self.compressed = stripped
            if not self.compressed and self.frame is not None:
                raise EOFError("the file ends within a frame")
            if not self.compressed:
                return 0
            self.frame = self.frame or self.new_frame()
            self.content = self.frame.decompress(self.compressed)
            self.compressed = self.frame.unused_data
            self.frame = None if self.frame.eof else self.frame
        size = min(len(buffer), len(self.content))
        buffer[:size], self.content = self.content[:size], self.content[size:]
        return size


def of_module(name: str) -> Callable[[BinaryIO], BinaryIO]:
    """`open` of a module of the standard library, which not every Python has."""
    return lambda file: importlib.import_module(name).open(file)


def open_frames(file: BinaryIO, new_frame: Callable[[], Any], padding: bytes = b"") -> BinaryIO:
    return io.BufferedReader(FramedFile(file, new_frame, padding), CONTENT_AT_ONCE)


def zstandard_frame() -> Any:
    import zstandard

    # Windows may have up to 2 GiB (`zstd --long=31`).
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


# Suffix -> opens the content of a compressed file
CODECS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": of_module("gzip"),
    ".bz2": of_module("bz2"),
    ".xz": lambda file: open_frames(file, importlib.import_module("lzma").LZMADecompressor, b"\0"),
    ".zst": lambda file: open_frames(file, zstandard_frame),
}


def open_compressed_jsonl(
    name: str, root: Path, files: Sequence[str], text_column: str, vocabulary: Vocabulary | None
) -> ShardedStream:
    """Compressed files with one JSON object per line; each file is a shard. `name` is for messages; with a vocabulary,
    the records may hold token ids."""
    data, tokens, chat = DataFiles(root, files), vocabulary is not None, vocabulary and vocabulary.chat

    def read(shard: int, number: int, state: Any) -> Iterator[tuple[bytes, Any]]:
        path, count = root / files[shard], 0
        try:
            with data.stamps[shard].open(path, AHEAD) as file, CODECS[path.suffix.lower()](file) as content:
                lines = LONGEST.lines(content, path)
                doing = f"{path}: reading to where the run stopped, which plain JSONL would find at once"
                with Waiting(doing, number, "documents") as waiting:
                    for _ in itertools.islice(lines, number):
                        waiting.done = count = count + 1
                for line in lines:
                    if count == 0:
                        require_utf_8(str(path), line)
                    count += 1
                    yield line, None
        except DataError:
            raise
        except Exception as error:  # each decoder has its own classes
            raise DataError(f"{path} cannot be read after line {count:,} ({brief(error)}).") from error

    lines = (line for shard in range(len(files)) for line, _ in read(shard, 0, None))
    with Waiting(f"{name}: looking for its first records"):
        first = list(itertools.islice((line for line in lines if line.strip()), LINES_LOOKED_AT))
        text_column = column_in(text_column, first[0], tokens, chat) if first else text_column
        check_columns(name, text_column, first, tokens, chat)
    text_of = partial(content_of_line, text_column=text_column, tokens=tokens, chat=chat)
    return ShardedStream(files, data.sizes, read, text_of, name, data.named_sizes, root=root, files=files)


def open_hub(path: str, text_column: str, purpose: str = TRAIN, vocabulary: Vocabulary | None = None) -> ShardedStream:
    """A data set on the Hub, `owner/name` or `owner/name/configuration`, streamed: the split that is for `purpose`."""
    import datasets

    owner, name, *configuration = path.split("/")
    logger.info(f"opening {path} on the Hugging Face Hub")
    try:
        splits = datasets.load_dataset(f"{owner}/{name}", *configuration, streaming=True)
        _, names = split_for(by_split(splits), purpose) or ("", list(splits))
        split = min(names, key=len)  # "train" rather than "train_sft"
        first = next(iter(dataset := splits[split]), None)
    except Exception as error:
        raise DataError(
            f"there is no file or folder {path}, and it cannot be opened as a data set on the Hub ({brief(error)}); "
            "check the spelling, the network, and HF_TOKEN or HF_HUB_OFFLINE if they are set."
        ) from error
    if len(splits) > 1:
        aside = ", ".join(name for name in splits if name != split)
        logger.info(f"{path}: only its split {split} is read; left out: {aside}")
    if first is None:
        raise DataError(f"the data set {path} on the Hub is empty.")
    chat = vocabulary and vocabulary.chat
    text_column = column_among(text_column, first, False, chat)
    chat = chat if is_conversation(text_column, column_of(first, text_column)) else None
    if chat is None and not isinstance(column_of(first, text_column), str):
        raise missing_column(path, text_column, sorted(first))
    return stream_of_dataset(dataset, path, text_column, chat)


def stream_of_dataset(dataset: Any, name: str, text_column: str, chat: Any = None) -> ShardedStream:
    """The documents of a `datasets.IterableDataset`, under the name of its source; with a `Chat`, conversations."""

    def read(shard: int, number: int, state: Any) -> Iterator[tuple[Any, Any]]:
        begin = 0
        try:
            records = dataset.shard(num_shards=dataset.num_shards, index=shard)
            if state is not None:
                begin, of_dataset = position_from(RecordsState, state)
                records.load_state_dict(of_dataset)
            for count, record in enumerate(records, begin + 1):
                if count % DOCUMENTS_PER_STATE == 0:
                    state = RecordsState(count, records.state_dict())._asdict()
                if count > number:
                    yield record if chat is not None else column_of(record, text_column), state
        except Exception as error:  # the network, a decoder or a parser may raise it; each library has its own classes
            raise DataError(f"{name}: cannot continue reading shard {shard} ({brief(error)}).") from error

    def text_of(text: Any) -> str | Tokens:
        if chat is not None:
            conversation: Tokens = chat.tokens(text, text_column)
            return conversation
        if not isinstance(text, str):
            raise ValueError(f"no text in column {text_column!r}")
        LONGEST.check(len(text), f"{name}: a record")
        return text

    shards = [f"{name}[{shard}]" for shard in range(dataset.num_shards)]
    return ShardedStream(shards, [1] * len(shards), read, text_of, name, name)
