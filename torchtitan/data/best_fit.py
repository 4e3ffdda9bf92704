"""Packing without cutting documents (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830)."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchtitan.data.packing import Corpus, PackedCounts, SourcePosition, SourceStream, Window, mix64, permute_index

# Windows of tokens that are packed together, from one row and source. Twice as many halve the padding; a start or a
# resume tokenizes them all before its first step.
POOL = 64
POOL_MOST = POOL + 4  # the pool grows to this while the tokens would leave the last window more than a quarter empty


class DocumentPiece(NamedTuple):
    """Tokens of a document: all, or as many as a window holds."""

    tokens: Any  # NDArray[np.integer], a view
    begins: bool  # the document
    ends: bool
    sample_id: str
    epoch: int


class BestFitStream(SourceStream):
    """A stream whose documents are cut only if they are longer than a window: into full windows and a rest.

    It draws documents until they have the tokens of POOL windows, puts them into windows by best fit decreasing, fills
    these up with padding, and gives them in random order. Meanwhile it draws the next documents, to spread the work.

    A position names the first document of the pool, and how many of its windows were `given`: resuming draws and packs
    the same pool again.
    """

    def __init__(self, corpus: Corpus, row: int, place: int, position: SourcePosition) -> None:
        super().__init__(corpus, row, place, replace(position, used=0))
        self.row = row
        self.given = position.used
        self.counts = position.packed or PackedCounts()
        self.pool_start = self.progress
        self.windows: list[list[DocumentPiece]] = []  # the pool's windows; empty before it is packed
        self.drawn: list[DocumentPiece] = []  # pieces for the next pool
        self.drawn_tokens = 0

    def position(self) -> SourcePosition:
        return SourcePosition(*self.pool_start, self.given, self.counts)

    def next_window(self) -> Window:
        length = self.corpus.seq_len + 1
        if not self.windows:
            self.draw_tokens(POOL * length)
            while -self.drawn_tokens % length > length // 4 and self.drawn_tokens < POOL_MOST * length:
                self.draw_tokens(self.drawn_tokens + 1)
            self.windows, self.pool_end = packed(self.drawn, length), self.progress
            self.drawn, self.drawn_tokens = [], 0
        key = mix64(mix64(self.row) + self.pool_start[1])
        pieces = self.windows[permute_index(self.given, len(self.windows), key)]
        self.given += 1
        self.draw_tokens(min(self.given, POOL) * length)
        if self.given == len(self.windows):
            self.pool_start, self.given, self.windows = self.pool_end, 0, []
        return self.window_of(pieces)

    def draw_tokens(self, number: int) -> None:
        """Draws until the next pool has this many tokens."""
        length = self.corpus.seq_len
        while self.drawn_tokens < number:
            self.draw()
            # Each piece begins with the last token of the one before it, so that each token of a document is predicted.
            for at in range(0, max(1, len(self.tokens) - 1), length) if len(self.tokens) else ():
                stop = min(at + length + 1, len(self.tokens))
                ends = stop == len(self.tokens)
                self.drawn.append(DocumentPiece(self.tokens[at:stop], at == 0, ends, self.sample_id, self.epoch))
                self.drawn_tokens += stop - at

    def window_of(self, pieces: Sequence[DocumentPiece]) -> Window:
        window = self.window([piece.tokens for piece in pieces], [piece.sample_id for piece in pieces])
        length = self.corpus.seq_len + 1
        begun = [piece for piece in pieces if piece.begins]
        # The first token of a rest was predicted at the end of the piece before it, and does not follow another text.
        starts = itertools.accumulate(len(piece.tokens) for piece in pieces)
        rests = [start for start, piece in zip(starts, pieces[1:], strict=False) if not piece.begins]
        of_window = len(begun), sum(not piece.ends for piece in begun), length - len(window.tokens) + len(rests)
        self.counts = PackedCounts(*map(sum, zip(self.counts, of_window, strict=True)))
        self.epoch = min(piece.epoch for piece in pieces)
        unpredicted = [*window.unpredicted, *rests]
        return window.filled_up(length)._replace(sample_ids=window.sample_ids, unpredicted=unpredicted)


def packed(pieces: Sequence[DocumentPiece], length: int) -> list[list[DocumentPiece]]:
    """The pieces in windows of at most `length` tokens, by best fit decreasing; in a window, in their order."""
    sizes = [len(piece.tokens) for piece in pieces]
    windows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that a window has room for, its index), sorted
    for number in sorted(range(len(pieces)), key=lambda number: -sizes[number]):
        size = sizes[number]
        fit = bisect.bisect(room, (size, -1))
        left, index = room.pop(fit) if fit < len(room) else (length, len(windows))
        if index == len(windows):
            windows.append([])
        windows[index].append(number)
        bisect.insort(room, (left - size, index))
    return [[pieces[number] for number in sorted(window)] for window in windows]
