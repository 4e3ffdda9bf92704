"""The batches of a validation set."""

import itertools
from collections.abc import Iterator

from torchtitan.config.training import Training, Validation
from torchtitan.data.datasets import validation_sources
from torchtitan.data.loader import Batch, BatchSpec, Retries, build_batch, build_batch_spec, steps
from torchtitan.data.packing import Corpus, SourcePosition, SourceStream, Window
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import DataError


class ValidationLoader:
    """Iterates over one rank's same batches each time. Keeps them: reading them again may require the network."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._unread = batches
        self._batches: list[Batch] = []

    def prepare(self) -> None:
        """Reads the first batch: a run should learn before its first step that it cannot validate. Raises a DataError
        if there are too few documents, or they cannot be read."""
        try:
            if next(iter(self), None) is None:
                raise DataError("The validation set has no text.")
        except DataError as error:
            if "the batch size" not in str(error):
                raise
            raise DataError(f"{error} The batch of a rank is validation.local_batch_size.") from error

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches
        for batch in self._unread:
            self._batches.append(batch)
            yield batch


def build_validation_loader(
    validation: Validation,
    training: Training,
    tokenizer: Tokenizer,
    *,
    dp_rank: int,
    dp_size: int,
    pin_memory: bool = False,
    retry_seconds: float = 0,
) -> ValidationLoader:
    """`validation.steps` batches of `validation.local_batch_size` held-out sequences for one data-parallel rank; or for
    -1 all documents once, in batches that hold the same sequences for any number of ranks.

    Raises:
        ConfigError: the data set is unknown.
        DataError: the data cannot be used.
    """
    rows = dp_size * validation.local_batch_size
    spec = build_batch_spec(training, rows, validation.local_batch_size, dp_rank, dp_size, pin_memory, tokenizer.eos_id)
    retries = Retries(retry_seconds)
    if validation.steps == -1:
        sources = validation_sources(validation, training, 1, tokenizer)
        whole = Corpus(sources, tokenizer, 1, training.seq_len, seed=None, marked=training.train_on is not None)
        numbered = retries.over(
            lambda last: itertools.islice(enumerate(whole_set(whole, rows, spec)), last[0] + 1 if last else 0, None)
        )
        return ValidationLoader(batch for _, batch in numbered)
    sources = validation_sources(validation, training, rows, tokenizer)
    corpus = Corpus(sources, tokenizer, rows, training.seq_len, seed=0, marked=training.train_on is not None)
    endless = itertools.chain.from_iterable(batches for batches, _ in steps(corpus, spec, None, retries))
    return ValidationLoader(itertools.islice(endless, validation.steps))


def whole_set(corpus: Corpus, rows: int, spec: BatchSpec) -> Iterator[Batch]:
    """One rank's part of all windows. Every rank reads all of them, and has as many batches as the others."""
    streams = (SourceStream(corpus, 0, place, SourcePosition()) for place in range(len(corpus.sources)))
    windows = itertools.chain.from_iterable(stream.windows_of_one_epoch() for stream in streams)
    while of_all_ranks := list(itertools.islice(windows, rows)):
        of_all_ranks += [Window.empty(corpus.seq_len + 1)] * (rows - len(of_all_ranks))
        yield build_batch([of_all_ranks[row] for row in spec.local_rows], spec)
