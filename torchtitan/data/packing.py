"""One row of the global batch: documents of its sources, tokenized and packed into windows."""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.data.sources import Document, StreamedSource, digest
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError

__all__ = ["Corpus", "Row", "Weighted", "Window", "tokens_of"]

LONGEST_PIECE = 1 << 22  # characters tokenized at once
PADDING = -100  # protocols.IGNORE_INDEX, without torch
MASK64 = (1 << 64) - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # its fractional part, times 2**64


class Weighted(NamedTuple):
    """A source, its name in messages, and its weight relative to the other sources."""

    source: StreamedSource
    name: str
    weight: float


@dataclass(frozen=True)
class Corpus:
    """Everything that determines the sequence of global batches.

    Attributes:
        sources: one source, or the parts of a mixture.
        tokenizer: encodes the text.
        rows: B, sequences in a global batch.
        seq_len: tokens in a sequence.
        seed: for shuffling documents; None: keep their order.
    """

    sources: Sequence[Weighted]
    tokenizer: Tokenizer
    rows: int
    seq_len: int
    seed: int | None

    @property
    def proportions(self) -> list[float]:
        """The fraction of tokens from each source."""
        weights = sum(weighted.weight for weighted in self.sources)
        return [weighted.weight / weights for weighted in self.sources]


class Window(NamedTuple):
    """`seq_len + 1` tokens of a row, the last of which is the first of the next window.

    Attributes:
        tokens: ids.
        document_ids: for each token, the index of its document within the window.
        sample_ids: the ids of those documents.
    """

    tokens: list[int]
    document_ids: list[int]
    sample_ids: list[str]

    def filled_up(self, length: int) -> "Window":
        missing = length - len(self.tokens)
        return Window(
            [*self.tokens, *[PADDING] * missing],
            [*self.document_ids, *[len(self.sample_ids)] * missing],
            [*self.sample_ids, ""],
        )


class SourceStream:
    """The endless, resumable stream of windows that one source provides to one row.

    Args:
        corpus: of all rows.
        row, place: index of the row, and of the source.
        position: where the documents resume; None: at the start.
        tokens: number of tokens read before that position.
        offset: how many tokens of the next document are already in windows.
    """

    def __init__(self, corpus: Corpus, row: int, place: int, position: Any, tokens: int, offset: int) -> None:
        self.corpus = corpus
        self.name = corpus.sources[place].name
        self.documents = corpus.sources[place].source.documents(
            row, corpus.rows, source_seed(corpus.seed, place), position
        )
        self.progress = position, tokens
        self.progress_before = self.progress  # before the current document was drawn
        self.tokens = array("i")  # of the current document: 4 bytes each, instead of 36 in a list
        self.offset = offset  # number of them already in windows
        self.sample_id = ""
        self.epoch = 0  # in which the current document was drawn

    def state(self) -> list[Any]:
        """JSON: the source's position before the current document, and how much of that document is used up."""
        return [*self.progress_before, self.offset]

    def next_window(self) -> Window:
        length = self.corpus.seq_len + 1
        window = Window([], [], [])
        # A document is drawn as late as possible, so that a source knows all of a rank's rows when it begins to read.
        if (resumed_at := self.offset) > len(self.tokens):
            self.draw()
            self.offset = resumed_at
        while True:
            part = self.tokens[self.offset : self.offset + length - len(window.tokens)]
            if part:
                window.tokens.extend(part)
                window.document_ids.extend([len(window.sample_ids)] * len(part))
                window.sample_ids.append(self.sample_id)
            if len(window.tokens) == length:
                self.offset += len(part) - 1
                return window
            self.draw()

    def windows_of_one_epoch(self) -> Iterator[Window]:
        """From a stream at its start: all documents once. The last window is filled up with PADDING."""
        length = self.corpus.seq_len + 1
        window = Window([], [], [])
        for drawn in itertools.takewhile(lambda drawn: drawn.epoch == 0, self.documents):
            tokens, start = tokens_of(drawn.document, self.corpus.tokenizer), 0
            while start < len(tokens):
                part = tokens[start : start + length - len(window.tokens)]
                window.tokens.extend(part)
                window.document_ids.extend([len(window.sample_ids)] * len(part))
                window.sample_ids.append(drawn.document.id)
                start += len(part)
                if len(window.tokens) == length:
                    yield window
                    window = Window(window.tokens[-1:], [0], window.sample_ids[-1:])
        if len(window.tokens) > 1:
            yield window.filled_up(length)

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

    In a mixture each window comes from one source, determined by its index among the windows of all rows: the
    fractional parts of multiples of the golden ratio fill [0, 1) as evenly as possible (Knuth, volume 3, 6.4), and each
    source owns an interval in proportion to its weight. So token counts follow the weights from the first step on,
    regardless of document length.

    Args:
        corpus: of all rows.
        number: index of this row.
        state: where to resume, as returned by `state`; None: at the start.
    """

    def __init__(self, corpus: Corpus, number: int, state: Any = None) -> None:
        self.corpus = corpus
        self.number = number
        sources = (state or {}).get("sources") or [[None, 0, 0] for _ in corpus.sources]
        if len(sources[0]) == 2:  # older format, which drew complete documents: offset in the current one
            offset = state["offset"] if len(sources) == 1 else 0
            sources = [[position, tokens, offset] for position, tokens in sources]
        self.windows = (state or {}).get("windows", sum(tokens for _, tokens, _ in sources) // corpus.seq_len)
        self.streams = [SourceStream(corpus, number, place, *source) for place, source in enumerate(sources)]
        self.epoch = state["epoch"] if state is not None else 0

    def state(self) -> dict[str, Any]:
        """JSON."""
        return {"sources": [stream.state() for stream in self.streams], "windows": self.windows, "epoch": self.epoch}

    def next_window(self) -> Window:
        stream = self.streams[source_of_window(self.windows * self.corpus.rows + self.number, self.corpus.proportions)]
        window = stream.next_window()
        self.windows, self.epoch = self.windows + 1, stream.epoch
        return window


def source_of_window(window: int, proportions: Sequence[float]) -> int:
    """The source of a window, by its index among those of all rows.

    Args:
        proportions: of the sources; they sum to 1.
    """
    fraction = (window * GOLDEN_RATIO & MASK64) / 2**64
    for place, end in enumerate(itertools.accumulate(proportions)):
        if fraction < end:
            return place
    return len(proportions) - 1


def tokens_of(document: Document, tokenizer: Tokenizer) -> "array[int]":
    """The token ids of a document, with BOS and EOS as the tokenizer adds them."""
    tokens = array("i")
    if not document.text:
        return tokens
    if document.starts and tokenizer.bos_id is not None:
        tokens.append(tokenizer.bos_id)
    for number, piece in enumerate(pieces_of(document.text)):
        begins = document.starts and number == 0
        # A list makes an array faster than it extends one.
        tokens.extend(array("i", tokenizer.encode(piece) if begins else tokenizer.encode_rest(piece)))
    if document.ends and tokenizer.add_eos:
        tokens.append(tokenizer.eos_id)
    return tokens


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


def source_seed(seed: int | None, place: int) -> int | None:
    """A different seed for each source of a mixture, so that sources of equal length are not read in the same order."""
    return None if seed is None else int(digest([seed, place]), 16)
