"""Batches of a whole validation set."""

import itertools
from collections.abc import Iterator

from torchtitan.data.loader import Batch, BatchSpec, build_batch
from torchtitan.data.packing import Corpus, SourcePosition, SourceStream, Window


def whole_set(corpus: Corpus, rows: int, spec: BatchSpec) -> Iterator[Batch]:
    """One rank's part of all windows. Every rank reads all of them, and has as many batches as the others."""
    streams = (SourceStream(corpus, 0, place, SourcePosition()) for place in range(len(corpus.sources)))
    windows = itertools.chain.from_iterable(stream.windows_of_one_epoch() for stream in streams)
    while of_all_ranks := list(itertools.islice(windows, rows)):
        of_all_ranks += [Window.empty(corpus.seq_len + 1)] * (rows - len(of_all_ranks))
        yield build_batch([of_all_ranks[row] for row in spec.local_rows], spec)
