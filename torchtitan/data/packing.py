"""One row of the global batch: the order of its documents in each source, their tokens, and windows of these."""

import bisect
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.sources import UNCOUNTED, Document, Drawn, Source, StreamedSource, Tokens, digest, position_from
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError, counted
from torchtitan.files import is_uri

LONGEST_PIECE = 1 << 22  # characters tokenized at once
PADDING = -100  # protocols.IGNORE_INDEX, without torch
RARE_COUNTS = ("passed_over", "turn", "uncounted")  # counts of a row, in its state if they are not 0
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # its fractional part, times 2**64
MASK64 = (1 << 64) - 1


class Weighted(NamedTuple):
    """A source of a mixture."""

    source: StreamedSource
    name: str  # in messages
    weight: float  # relative to the other sources
    id: str = ""  # among the sources of all stages of a run
    place: int = 0  # among these

    @property
    def is_remote(self) -> bool:
        """Whether rows may be read at the same time, because each document takes a round trip."""
        return getattr(self.source, "is_remote", False)


@dataclass(frozen=True)
class Corpus:
    """Everything that determines the sequence of global batches."""

    sources: Sequence[Weighted]  # one source, or the parts of a mixture
    tokenizer: Tokenizer
    # Sequences in a global batch; if the batch size changes, a common multiple, of which each step takes some in turn.
    rows: int
    seq_len: int  # tokens in a sequence
    seed: int | None  # for shuffling documents; None: keep their order
    stream: "type[SourceStream]" = field(default_factory=lambda: SourceStream)  # packs the documents of a source
    passed_over: Sequence[range] = ()  # steps whose windows are drawn and not given, from 1
    marked: bool = False  # whether UNCOUNTED may mark tokens

    @property
    def proportions(self) -> list[float]:
        """The fraction of tokens from each source."""
        weights = sum(weighted.weight for weighted in self.sources)
        return [weighted.weight / weights for weighted in self.sources]


class Window(NamedTuple):
    """`seq_len + 1` tokens of a row, the last of which is the first of the next window."""

    tokens: NDArray[np.int64]
    document_ids: NDArray[np.int64]  # for each token, the index of its document within the window
    sample_ids: list[str]  # the ids of those documents
    unpredicted: Sequence[int] = ()  # places of tokens that this window does not predict; 0 is not named

    @classmethod
    def of(cls, pieces: Sequence[Tokens], sample_ids: list[str]) -> "Window":
        """From the tokens of each document, which are copied."""
        tokens = np.concatenate(pieces, dtype=np.int64, casting="same_kind")
        return cls(tokens, np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces]), sample_ids)

    def filled_up(self, length: int) -> "Window":
        missing = length - len(self.tokens)
        return Window(
            np.append(self.tokens, np.full(missing, PADDING)),
            np.append(self.document_ids, np.full(missing, len(self.sample_ids))),
            [*self.sample_ids, ""],
            self.unpredicted,
        )

    def without_marks(self) -> "Window":
        """Tokens without UNCOUNTED, which are unpredicted."""
        marked = self.tokens >= UNCOUNTED
        places = np.flatnonzero(marked[1:]) + 1
        return self._replace(tokens=self.tokens - UNCOUNTED * marked, unpredicted=places.tolist())

    @classmethod
    def empty(cls, length: int) -> "Window":
        """Only padding."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, []).filled_up(length)


class PackedCounts(NamedTuple):
    """What best fit has put into the windows given so far."""

    documents: int = 0
    cut: int = 0  # documents that continue in another window
    padding: int = 0  # places without a prediction: padding, and first tokens of rests


@dataclass(frozen=True)
class SourcePosition:
    """Where a row resumes in one source.

    Attributes:
        documents: the source's own position, as JSON, before the current document or pool; None: at the start.
        tokens: number of tokens read before that.
        used: how many tokens of the current document, or with best fit windows of the pool, are given already.
        packed: only with best fit.
    """

    documents: Any = None
    tokens: int = 0
    used: int = 0
    packed: PackedCounts | None = None

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"packed": self.packed and self.packed._asdict()}

    @classmethod
    def from_json(cls, values: Any) -> "SourcePosition":
        if isinstance(values, list):  # Earlier versions wrote one, which ended with the counts if there were any.
            documents, tokens, used, *counts = values
            values = [documents, tokens, used, counts or None]
        position = position_from(cls, values)
        packed: Any = position.packed
        return replace(position, packed=None if packed is None else position_from(PackedCounts, packed))


@dataclass(frozen=True)
class RowPosition:
    """Where a row resumes. `Row` says what the numbers mean."""

    sources: Sequence[SourcePosition]
    windows: int
    epoch: int
    epochs: Sequence[int]
    passed_over: int = 0
    turn: int = 0
    uncounted: int = 0

    def to_json(self) -> dict[str, Any]:
        sources = [source.to_json() for source in self.sources]
        always = {"sources": sources, "windows": self.windows, "epoch": self.epoch, "epochs": list(self.epochs)}
        return always | {key: count for key in RARE_COUNTS if (count := getattr(self, key))}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RowPosition":
        sources, epoch = [SourcePosition.from_json(source) for source in values["sources"]], values.get("epoch", 0)
        epochs = values.get("epochs") or [epoch] * len(sources)  # States of earlier versions lack them.
        windows = values.get("windows", 0) if len(sources) == 1 else values["windows"]
        return cls(sources, windows, epoch, epochs, *(values.get(key, 0) for key in RARE_COUNTS))


class SourceStream:
    """The endless, resumable stream of windows that one source provides to one row.

    Args:
        row, place: index of the row, and of the source.
    """

    def __init__(self, corpus: Corpus, row: int, place: int, position: SourcePosition) -> None:
        self.corpus = corpus
        source = corpus.sources[place]
        self.name = source.name
        # Each source of a mixture has its own seed, or sources of equal length would be read in the same order.
        seed = None if corpus.seed is None else int(digest([corpus.seed, source.place]), 16)
        self.documents = source.source.documents(row, corpus.rows, seed, position.documents)
        self.progress = position.documents, position.tokens
        self.progress_before = self.progress  # before the current document was drawn
        self.tokens: Tokens = np.empty(0, np.int32)  # the current document's
        self.offset = position.used  # number of them already in windows
        self.pieces: list[Tokens] = []  # pieces of the window that is being made, with the ids of their documents
        self.piece_ids: list[str] = []
        self.sample_id = ""
        self.epoch = 0  # in which the current document was drawn

    def position(self) -> SourcePosition:
        return SourcePosition(*self.progress_before, self.offset)

    def next_window(self) -> Window:
        missing = self.corpus.seq_len + 1
        self.pieces, self.piece_ids = [], []
        # A document is drawn as late as possible, so that a source knows all of a rank's rows when it begins to read.
        if (resumed_at := self.offset) > len(self.tokens):
            self.draw()
            self.offset = resumed_at
        while True:
            if len(piece := self.tokens[self.offset : self.offset + missing]):
                self.pieces.append(piece)
                self.piece_ids.append(self.sample_id)
                missing -= len(piece)
            if missing == 0:
                self.offset += len(piece) - 1
                return self.window(self.pieces, self.piece_ids)
            self.draw()

    def windows_of_one_epoch(self) -> Iterator[Window]:
        """From a stream at its start: all documents once. The last window is filled up with PADDING."""
        self.documents = itertools.takewhile(lambda drawn: drawn.epoch == 0, self.documents)
        with suppress(StopIteration):  # when a window needs more than the last document
            while True:
                yield self.next_window()
        if sum(map(len, self.pieces)) > 1:
            yield self.window(self.pieces, self.piece_ids).filled_up(self.corpus.seq_len + 1)

    def window(self, pieces: Sequence[Tokens], sample_ids: list[str]) -> Window:
        """Raises a DataError if a token is not of the vocabulary."""
        window, size = Window.of(pieces, sample_ids), self.corpus.tokenizer.vocab_size
        window = window.without_marks() if self.corpus.marked else window
        if window.tokens.view("u8").max() >= size:  # unsigned, a number below 0 is large, too
            [place, *_] = ((window.tokens >= size) | (window.tokens < 0)).nonzero()[0]
            raise DataError(
                f"{self.name}: document {sample_ids[window.document_ids[place]]} holds token {window.tokens[place]}, "
                f"but the run's tokenizer has only 0 to {size - 1}; set model.tokenizer_path to the one that made "
                "them, or training.token_dtype if the files do not say it."
            )
        return window

    def draw(self) -> None:
        """Draws the next document."""
        drawn = next(self.documents)
        _, tokens = self.progress
        if drawn.epoch > 0 and tokens <= self.corpus.seq_len:
            raise DataError(
                f"{self.name} is too small: one of the {self.corpus.rows} rows of a global batch gets only "
                f"{tokens} tokens, fewer than one sequence ({self.corpus.seq_len} and one to predict); add text, or "
                "lower training.seq_len or the batch size."
            )
        self.tokens = tokens_of(drawn.document, self.corpus.tokenizer)
        self.sample_id, self.epoch = drawn.document.id, drawn.epoch
        self.offset = 0
        self.progress_before = self.progress
        self.progress = drawn.position, tokens + len(self.tokens)


class Row:
    """The endless, resumable stream of windows of one row.

    `windows` is the number drawn: of these, `passed_over` were not given, and `uncounted` are of earlier stages. `turn`
    is the number of this stage's steps in which it was not always this row's turn. `epochs` is how often the row has
    read each source's documents.

    In a mixture each window comes from one source, determined by its index among the windows of all rows: the
    fractional parts of multiples of the golden ratio fill [0, 1) as evenly as possible (Knuth, volume 3, 6.4), and each
    source owns an interval in proportion to its weight. So token counts follow the weights from the first step on,
    regardless of document length.

    Args:
        number: index of this row.
        position: where to resume, as returned by `position`; None: at the start.
    """

    def __init__(self, corpus: Corpus, number: int, position: RowPosition | None = None) -> None:
        self.corpus = corpus
        self.number = number
        sources = len(corpus.sources)
        start = position or RowPosition([SourcePosition()] * sources, windows=0, epoch=0, epochs=[0] * sources)
        if not len(start.sources) == len(start.epochs) == sources:
            raise ValueError(f"a row has positions in {len(start.sources)} sources, and the data are {sources}")
        self.streams = [corpus.stream(corpus, number, place, source) for place, source in enumerate(start.sources)]
        self.windows, self.epoch, self.epochs = start.windows, start.epoch, list(start.epochs)
        self.passed_over, self.turn, self.uncounted = start.passed_over, start.turn, start.uncounted

    def position(self) -> RowPosition:
        sources = [stream.position() for stream in self.streams]
        return RowPosition(
            sources, self.windows, self.epoch, [*self.epochs], self.passed_over, self.turn, self.uncounted
        )

    @property
    def source(self) -> int:
        """Of the next window."""
        window = self.windows * self.corpus.rows + self.number  # among the windows of all rows
        fraction = window * GOLDEN_RATIO % 2**64 / 2**64
        return bisect.bisect([*itertools.accumulate(self.corpus.proportions[:-1])], fraction)

    def next_window(self) -> Window:
        place = self.source
        stream = self.streams[place]
        window = stream.next_window()
        self.windows, self.epoch = self.windows + 1, stream.epoch
        self.epochs[place] = max(self.epochs[place], stream.epoch)  # best fit gives windows in random order
        return window


def carried(positions: Mapping[str, RowPosition], old: Corpus, new: Corpus) -> dict[str, RowPosition]:
    """Positions of rows, by number, for another corpus: sources that are in both go on, others begin. Where documents
    are packed differently, a document or best-fit pool that has begun begins again."""
    former = {source.id: index for index, source in enumerate(old.sources)}
    same = old.stream is new.stream and (old.seq_len == new.seq_len or new.stream is SourceStream)
    carried = {}
    for number, position in positions.items():
        sources, epochs = [], []
        for place in (former.get(source.id) for source in new.sources):
            before = SourcePosition() if place is None else position.sources[place]
            sources.append(SourcePosition(before.documents, before.tokens, before.used if same else 0))
            epochs.append(0 if place is None else position.epochs[place])
        carried[number] = replace(position, sources=sources, epochs=epochs, uncounted=position.windows, turn=0)
    return carried


def tokens_of(document: Document, tokenizer: Tokenizer) -> Tokens:
    """The token ids of a document, or of its text with BOS and EOS as the tokenizer adds them."""
    if document.tokens is not None:
        return document.tokens
    tokens = array("i")  # 4 bytes each, instead of 36 in a list
    if document.text:
        if document.starts and tokenizer.bos_id is not None:
            tokens.append(tokenizer.bos_id)
        for number, piece in enumerate(pieces_of(document.text)):
            begins = document.starts and number == 0
            # A list makes an array faster than it extends one.
            tokens.extend(array("i", tokenizer.encode(piece) if begins else tokenizer.encode_rest(piece)))
        if document.ends and tokenizer.add_eos:
            tokens.append(tokenizer.eos_id)
    return np.array(tokens, np.int32)


def pieces_of(text: str) -> Iterator[str]:
    """A long text in pieces, split before a blank if possible. A tokenizer needs about 50 bytes per character, and a
    blank starts a new word anyway."""
    start = 0
    while len(text) - start > LONGEST_PIECE:
        last = start + LONGEST_PIECE
        cut = max(text.rfind(" ", start + 1, last), text.rfind("\n", start + 1, last))
        cut = cut if cut > start + LONGEST_PIECE // 2 else last
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


class StridedPosition(NamedTuple):
    """Where a row resumes in a permutation of documents."""

    epoch: int
    place: int  # the next document's, in the order of the epoch
    turn: int = 0  # number of the rotation, which shuffled documents do not have


@dataclass(eq=False)
class StridedSource:
    """Adapts a random-access source to a streamed one: row j of B reads documents j, j + B, ... of a permutation.

    Without shuffling, documents stay in order, but later epochs give a block's B documents to other rows. Otherwise the
    same rows would read short documents again and again, while others still read long ones.
    """

    source: Source
    name: str  # for messages

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def is_remote(self) -> bool:
        """Whether reading a document takes a round trip, so that rows are read at the same time, by threads."""
        return is_remote_source(self.source)

    def documents(self, row: int, rows: int, seed: int | None, position: Any) -> Iterator[Drawn]:
        length = len(self.source)
        if length < rows:
            raise DataError(
                f"{self.name} has {counted(length, 'document')} for the {counted(rows, 'row')} of a global batch; "
                "lower the batch size or add documents."
            )
        return self.endless(row, rows, seed, position_from(StridedPosition, (0, row) if position is None else position))

    def endless(self, row: int, rows: int, seed: int | None, position: StridedPosition) -> Iterator[Drawn]:
        length, (epoch, place, turn) = len(self.source), position
        while True:
            key = None if seed is None else mix64(mix64(seed) + epoch)
            while place < length:
                index = rotated(place, length, rows, turn) if key is None else permute_index(place, length, key)
                place += rows
                yield Drawn(self.source[index], epoch, StridedPosition(epoch, place, turn)._asdict())
            epoch, place = epoch + 1, row if key is not None else place - length
            turn = 0 if key is not None else epoch


def is_remote_source(source: Source) -> bool:
    """Whether a source says so, or its files are in an object store."""
    return getattr(source, "is_remote", is_uri(str(getattr(source, "root", ""))))


def rotated(place: int, length: int, rows: int, turn: int) -> int:
    """The image of `place` under a permutation that rotates each complete block of `rows` places, by another number in
    each block and turn; in turn 0 none."""
    block, row = divmod(place, rows)
    if turn == 0 or (block + 1) * rows > length:
        return place
    return block * rows + (row + mix64(mix64(turn) + block)) % rows


def permute_index(index: int, length: int, key: int) -> int:
    """The image of `index` under a permutation of 0 to `length`, chosen by `key`.

    A Feistel network of four rounds over the next power of four, iterated until the result is in range (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no table, so a billion documents take no memory,
    and gives the same result on every platform and version.
    """
    half = max((length - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):  # mix64(key ^ mix64(right << 2 | turn)), without calls, which take half of the time
            value = ((right << 2 | turn) + 0x9E3779B97F4A7C15) & MASK64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
            value = ((key ^ value ^ (value >> 31)) + 0x9E3779B97F4A7C15) & MASK64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
            left, right = right, left ^ ((value ^ (value >> 31)) & mask)
        index = left << half | right
        if index < length:
            return index


def mix64(value: int) -> int:
    """64 well-mixed bits of an integer: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)
