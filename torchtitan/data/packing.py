"""One row of the global batch: documents drawn from its sources, tokenized, and packed into windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.data.sources import Drawn, StreamedSource, digest
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError

__all__ = ["Corpus", "Row", "Weighted", "Window"]


class Weighted(NamedTuple):
    """A source, what to call it in messages, and its share of the tokens relative to the others'."""

    source: StreamedSource
    name: str
    weight: float


@dataclass(frozen=True)
class Corpus:
    """All that the sequence of global batches depends on.

    Attributes:
        sources: one, or the parts of a mixture.
        tokenizer: makes the tokens.
        rows: B, sequences in a global batch.
        seq_len: tokens in a sequence.
        seed: of the order of the documents; None: as they come.
    """

    sources: Sequence[Weighted]
    tokenizer: Tokenizer
    rows: int
    seq_len: int
    seed: int | None


class Window(NamedTuple):
    """`seq_len + 1` tokens of a row, the last of which begins the next window.

    Attributes:
        tokens: ids.
        document_ids: for each token, the number within the window of the document that it is from.
        sample_ids: the ids of those documents.
    """

    tokens: list[int]
    document_ids: list[int]
    sample_ids: list[str]


class Row:
    """The endless stream of windows of one row, which can be taken up again at any window.

    In a mixture the next document is drawn from the source that lacks the most tokens to its share of all so far.

    Args:
        corpus: of all rows.
        number: which of them this is.
        state: where to begin, as `state` was; None: at the start.
    """

    def __init__(self, corpus: Corpus, number: int, state: Any = None) -> None:
        self.corpus = corpus
        self.number = number
        # For each source: the position from which it goes on, and how many tokens came from it.
        self.progress: list[tuple[Any, int]] = [(p, n) for p, n in (state or {}).get("sources", [])] or [
            (None, 0) for _ in corpus.sources
        ]
        self.streams = [
            weighted.source.documents(number, corpus.rows, source_seed(corpus.seed, place), position)
            for place, (weighted, (position, _)) in enumerate(zip(corpus.sources, self.progress, strict=True))
        ]
        self.progress_before = self.progress  # as it was before the document in hand was drawn
        self.offset = 0  # tokens of it that are in windows already
        self.tokens: list[int] = []
        self.sample_id = ""
        self.epoch = state["epoch"] if state is not None else 0  # that the document in hand was drawn in
        if state is not None and state["offset"]:
            self.draw()
            self.offset = state["offset"]

    def state(self) -> dict[str, Any]:
        """JSON: how far each source was before the document in hand, and how much of that document is used up."""
        sources = [list(pair) for pair in self.progress_before]
        return {"sources": sources, "offset": self.offset, "epoch": self.epoch}

    def next_window(self) -> Window:
        length = self.corpus.seq_len + 1
        window = Window([], [], [])
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

    def draw(self) -> None:
        """Takes the next document in hand."""
        place = self.most_in_want()
        drawn = next(self.streams[place])
        if drawn.epoch > 0 and self.progress[place][1] <= self.corpus.seq_len:
            raise DataError(
                f"{self.corpus.sources[place].name} is too small: what falls to one of the {self.corpus.rows} rows of "
                f"a global batch is {self.progress[place][1]} tokens, shorter than one sequence ({self.corpus.seq_len}"
                " and one to predict); give more text, or lower training.seq_len or the batch size."
            )
        self.tokens = self.tokenized(drawn)
        self.sample_id, self.epoch = drawn.document.id, drawn.epoch
        self.offset = 0
        self.progress_before = list(self.progress)
        self.progress[place] = drawn.position, self.progress[place][1] + len(self.tokens)

    def most_in_want(self) -> int:
        """The source whose tokens are furthest below its share; on a tie each row starts with another."""
        sources, total = self.corpus.sources, sum(tokens for _, tokens in self.progress)
        weights = sum(weighted.weight for weighted in sources)
        return max(
            range(len(sources)),
            key=lambda place: (
                sources[place].weight / weights * total - self.progress[place][1],
                (place - self.number) % len(sources),
            ),
        )

    def tokenized(self, drawn: Drawn) -> list[int]:
        document, tokenizer = drawn.document, self.corpus.tokenizer
        if not document.text:
            return []
        tokens = tokenizer.encode(document.text)
        if document.starts and tokenizer.bos_id is not None:
            tokens.insert(0, tokenizer.bos_id)
        if document.ends:
            tokens.append(tokenizer.eos_id)
        return tokens


def source_seed(seed: int | None, place: int) -> int | None:
    """Another seed for each source of a mixture, so that equally long ones are not read in the same order."""
    return None if seed is None else int(digest([seed, place]), 16)
