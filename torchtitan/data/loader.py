"""Batches for the ranks of a run, and the loader state for resuming."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from torchtitan.config.fields import step_ranges
from torchtitan.config.training import Training
from torchtitan.data.datasets import DataOfRun, training_sources
from torchtitan.data.packing import PADDING, Corpus, Row, RowPosition, Window, carried
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.logging import Waiting, logger
from torchtitan.registry import deferred, load

PREFETCHED_STEPS = 2
MOST_ROWS_AT_ONCE = 32  # limit for rows whose documents are awaited from a remote source at the same time
SECONDS_BETWEEN_LOOKS = 0.05  # how soon a waiting reader or writer notices that it is cancelled or closed
SECONDS_TO_STOP = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before data are read again

_is_transient: Callable[..., bool] = deferred("torchtitan.data.transient:is_transient")
_mtp_inputs: Callable[..., dict[str, torch.Tensor]] = deferred("torchtitan.models.mtp:mtp_inputs")

T = TypeVar("T")

PACKINGS = {  # training.packing -> stream
    "concatenate": "torchtitan.data.packing:SourceStream",
    "best_fit": "torchtitan.data.best_fit:BestFitStream",
}


@dataclass(frozen=True)
class Batch:
    """A micro-batch: sequences for one forward and backward pass of one rank. Tensors are (rows, seq_len), int64."""

    tokens: torch.Tensor
    labels: torch.Tensor  # the token that follows each token; IGNORE_INDEX where nothing is predicted
    document_ids: torch.Tensor | None  # a number for each document of a sequence; None unless requested
    sample_ids: list[list[str]] | None  # for each row the ids of its documents; None if not needed
    factor: torch.Tensor | float = 1.0  # on the loss, before the backward pass
    mtp: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of `mtp_inputs`, (rows, depths, seq_len)
    sources: Sequence[int] = ()  # the place in the mixture of the source of each row


@dataclass(frozen=True)
class BatchSpec:
    """How a rank builds micro-batches."""

    local_rows: Sequence[int]  # this rank's rows
    rows_per_step: int  # how many of them give a window in a step: all, unless the batch size of the run changes
    local_batch_size: int  # rows per micro-batch
    document_ids: bool  # whether they have the ids of their documents
    sample_ids: bool  # whether they have the ids of their samples
    pin_memory: bool  # whether they are in page-locked memory, so that a GPU copies them while the host goes on
    no_loss_after: int | None = None  # a token after which nothing is predicted; None: no such token
    mtp_layers: int = 0


def build_batch_spec(
    training: Training,
    rows: int,
    local_batch_size: int,
    dp_rank: int,
    dp_size: int,
    pin_memory: bool,
    eos_id: int,
    all_rows: int | None = None,
) -> BatchSpec:
    if rows % (dp_size * local_batch_size):
        raise ConfigError(
            f"training.global_batch_size: {rows} sequences cannot be divided into micro-batches of "
            f"training.local_batch_size = {local_batch_size} on {dp_size} data-parallel ranks; make it a multiple of "
            f"{dp_size * local_batch_size}."
        )
    rows_per_rank = rows // dp_size
    # In each step, ranks take consecutive parts of `rows` consecutive rows.
    first_rows = range(dp_rank * rows_per_rank, all_rows or rows, rows)
    local_rows = [first + row for first in first_rows for row in range(rows_per_rank)]
    named = training.record_sample_ids or training.skip_nonfinite or training.skip_grad_norm_outliers is not None
    no_loss_after = eos_id if training.eod_mask_loss else None
    mask = training.document_mask
    return BatchSpec(local_rows, rows_per_rank, local_batch_size, mask, named, pin_memory, no_loss_after)


def build_batch(windows: Sequence[Window], spec: BatchSpec, sources: Sequence[int] = ()) -> Batch:
    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if spec.pin_memory else tensor

    tokens = torch.from_numpy(np.stack([window.tokens for window in windows]))
    labels = tokens[:, 1:].clone(memory_format=torch.contiguous_format)
    for row, window in enumerate(windows):
        labels[row, [place - 1 for place in window.unpredicted]] = PADDING
    if spec.no_loss_after is not None:
        labels[tokens[:, :-1] == spec.no_loss_after] = PADDING
    ids = [window.document_ids for window in windows]
    mtp = _mtp_inputs(tokens, labels, torch.from_numpy(np.stack(ids)), spec.mtp_layers) if spec.mtp_layers else {}
    return Batch(
        tokens=place(tokens[:, :-1].clamp(min=0).contiguous()),
        labels=place(labels),
        document_ids=place(torch.from_numpy(np.stack([each[:-1] for each in ids]))) if spec.document_ids else None,
        # The last token of a window is only a label: its document is of the sample only if it has other tokens.
        sample_ids=[w.sample_ids[: w.document_ids[-2] + 1] for w in windows] if spec.sample_ids else None,
        mtp={name: place(tensor) for name, tensor in mtp.items()},
        sources=sources,
    )


def next_windows(rows: Sequence[Row], threads: ThreadPool | None) -> list[Window]:
    """The next window of each row. Windows of remote sources are awaited together: each document takes a round trip."""
    remote = [row for row in rows if threads is not None and row.corpus.sources[row.source].is_remote]
    awaited = threads.map_async(Row.next_window, remote, 1) if threads is not None and remote else None
    drawn = {row.number: row.next_window() for row in rows if row not in remote}
    drawn |= zip((row.number for row in remote), awaited.get() if awaited else (), strict=True)
    return [drawn[row.number] for row in rows]


Positions = Mapping[str, RowPosition]  # row number, as a string for JSON -> its position
Step = tuple[list[Batch], Positions]  # the micro-batches of an optimizer step, and the positions after them


class Loader:
    """Endless optimizer steps of batches for one data-parallel rank, prefetched by a thread.

    Attributes:
        identity: of the data and what determines their order, as JSON.
        wait_seconds: total time that `next` has waited for a batch.
    """

    def __init__(
        self, corpus: Corpus, spec: BatchSpec, identity: Mapping[str, Any], prefetch: int, retry_seconds: float
    ) -> None:
        self._corpus = corpus
        self._spec = spec
        self.identity = dict(identity)
        self._prefetch = prefetch
        self._retries = Retries(retry_seconds)
        self._waited_before = 0.0
        self._start(None)

    def _start(self, positions: Positions | None) -> None:
        self._positions = positions_of(rows_at(positions, self._corpus, self._spec))  # fails here, not in the thread
        self._steps = Prefetcher(steps(self._corpus, self._spec, self._positions, self._retries), self._prefetch)

    @property
    def retrying(self) -> bool:
        """Whether reading has failed, and is tried again."""
        return self._retries.active

    @property
    def packed(self) -> dict[str, int]:
        """What best-fit packing has put into this rank's batches returned so far: documents, how many of them are cut,
        tokens of padding, and all tokens. Empty without it."""
        positions = self._positions.values()
        counts = [source.packed for position in positions for source in position.sources if source.packed]
        if not counts:
            return {}
        tokens = self._corpus.seq_len * sum(row.windows - row.uncounted for row in positions)
        documents, cut, padding = map(sum, zip(*counts, strict=True))
        return {"documents": documents, "cut": cut, "padding": padding, "tokens": tokens}

    @property
    def epochs(self) -> dict[str, int]:
        """By source, how often all of this rank's rows have read their documents, up to the batches returned."""
        names = [source.name for source in self._corpus.sources]
        names = [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]
        of_sources = zip(*(row.epochs for row in self._positions.values()), strict=True)
        return dict(zip(names, map(min, of_sources), strict=True))

    @property
    def wait_seconds(self) -> float:
        return self._waited_before + self._steps.wait_seconds

    @property
    def description(self) -> str:
        """A short description of the data."""
        sources = self._corpus.sources
        shares = zip(sources, self._corpus.proportions, strict=True)
        mixture = [f"{source.name} {share:.0%}" for source, share in shares]
        tokenizer = self._corpus.tokenizer
        return (
            f"{', '.join(mixture) if len(sources) > 1 else sources[0].name}"
            f"{'' if self.identity['shuffle'] else ', not shuffled'}"
            f"{', one document in 100 held out' if self.identity['hold_out'] else ''}"
            f"; {tokenizer.kind} tokenizer with {tokenizer.vocab_size:,} tokens; {tokenizer.boundaries}"
        )

    def wait(self, cancelled: Callable[[], object] = lambda: False) -> bool:
        """Returns once `next` would not block, or `cancelled` returns true: whether it would not. Consumes nothing.
        Like `next`, raises a DataError if the data cannot be read, or are too small."""
        return self._steps.wait(cancelled)

    def next(self) -> list[Batch]:
        """The micro-batches of the next optimizer step, `local_batch_size` sequences each."""
        batches, self._positions = self._steps.next()
        return batches

    def state_dict(self) -> dict[str, Any]:
        """This rank's position after the batches returned so far, as JSON, for `merge_states`."""
        return {**self.identity, **state_of({number: row.to_json() for number, row in self._positions.items()})}

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merges the states of all data-parallel ranks into one that any number of ranks can load."""
        positions: dict[str, Any] = {}
        for state in states:
            positions.update(state["positions"])
        return {**states[0], **state_of(positions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a merged state, written by any number of ranks. Raises a CheckpointError if it was made with
        other data, another tokenizer, seed, batch size or sequence length."""
        check_data_identity(self.identity, state, self._corpus.rows)
        self._restart(positions_in(state))
        row, listed = next(iter(self._positions.values())), self._corpus.passed_over
        if row.passed_over < sum(any(n in steps for steps in listed) for n in range(1, row.windows + 1)):
            logger.warning(
                "training.skip_steps: the checkpoint has been trained on the data of some of these steps already; to "
                f"pass over them, resume from one before step {min(steps.start for steps in listed)}"
            )

    def go_on_from(self, former: "Loader", state: Mapping[str, Any]) -> None:
        """Continues from the merged state of the last stage's loader: sources that are in both go on, others begin."""
        self._restart(carried(positions_in(state), former._corpus, self._corpus))

    def _restart(self, positions: Positions) -> None:
        self.close()
        self._waited_before = self.wait_seconds
        self._start(positions)

    def close(self) -> None:
        """Stops prefetching. Otherwise it stops when the process ends."""
        self._steps.close()


@dataclass
class Retries:
    """Reads again, for some `seconds` from the first error until an item is read."""

    seconds: float
    end: float | None = None  # when to give up reading again

    @property
    def active(self) -> bool:
        """Whether an item is read again now."""
        end = self.end  # the loader's thread may set it to None
        return end is not None and time.monotonic() < end

    def over(self, start: Callable[[T | None], Iterator[T]]) -> Iterator[T]:
        """The items of `start(None)`; after a transient error, of `start(last)`, which go on after the last item.
        An error that is not transient, or comes when the time is over, is raised."""
        last: T | None = None
        items: Iterator[T] | None = None
        pause = FIRST_PAUSE
        while True:
            try:
                items = start(last) if items is None else items
                last = next(items)
            except StopIteration:
                return
            except Exception as error:
                now = time.monotonic()
                self.end = now + self.seconds if self.end is None else self.end
                if now >= self.end or not _is_transient(error):
                    self.end = None
                    raise
                pause = min(pause, self.end - now)
                reason = str(error).rstrip(".")
                logger.warning(
                    f"{reason}. Reading again in {pause:.1f} s; training.retry_seconds leaves {self.end - now:.0f} s"
                )
                time.sleep(pause)
                items, pause = None, min(2 * pause, LONGEST_PAUSE)
            else:
                self.end, pause = None, FIRST_PAUSE
                yield last


class Prefetcher(Generic[T]):
    """Prefetches an endless iterator, of anything but None, in a daemon thread, which queues up to `depth` items.

    Attributes:
        wait_seconds: total time that the reader has waited.
        close: stops the thread. A thread blocked on the network is abandoned, and ends once it is unblocked.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.wait_seconds = 0.0
        self._item: T | BaseException | None = None  # taken from the queue by `wait`; a failure stays
        self._ready: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        thread = threading.Thread(target=run_ahead, args=(items, self._ready, self._closed), daemon=True)
        # The thread references the queue and the event but not this object, so deleting this object stops the thread.
        # So does the end of the process: a thread still inside a tokenizer at interpreter exit would abort it.
        self.close = weakref.finalize(self, stop, self._closed, thread)
        thread.start()

    def wait(self, cancelled: Callable[[], object] = lambda: False) -> bool:
        """Waits for the next item until `cancelled()`: whether it is available. Re-raises the iterator's exception."""
        if self._closed.is_set() and not isinstance(self._item, BaseException):
            raise RuntimeError("The loader is closed.")
        start = said = time.perf_counter()
        while self._item is None and not cancelled():
            with suppress(queue.Empty):
                self._item = self._ready.get(timeout=SECONDS_BETWEEN_LOOKS)
            if (now := time.perf_counter()) - said > Waiting.INTERVAL:
                said = now
                logger.info(f"waiting for the next documents: {now - start:.0f} s so far")
        self.wait_seconds += time.perf_counter() - start
        if isinstance(self._item, BaseException):
            raise self._item
        return self._item is not None

    def next(self) -> T:
        """The next item. Re-raises the iterator's exception."""
        self.wait()
        item, self._item = self._item, None
        return cast(T, item)


def stop(closed: threading.Event, thread: threading.Thread) -> None:
    closed.set()
    if thread is not threading.current_thread():
        thread.join(SECONDS_TO_STOP)


def run_ahead(items: Iterator[T], ready: "queue.Queue[T | BaseException]", closed: threading.Event) -> None:
    def queued(item: T | BaseException) -> bool:
        """Whether it was queued before the reader closed."""
        while not closed.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=SECONDS_BETWEEN_LOOKS)
                return True
        return False

    try:
        for item in items:
            if not queued(item):
                return
    except BaseException as error:  # any exception belongs to the reader
        queued(error)


def rows_at(positions: Positions | None, corpus: Corpus, spec: BatchSpec) -> list[Row]:
    return [Row(corpus, number, None if positions is None else positions[str(number)]) for number in spec.local_rows]


def positions_of(rows: Sequence[Row]) -> Positions:
    return {str(row.number): row.position() for row in rows}


def positions_in(state: Mapping[str, Any]) -> Positions:
    return {number: RowPosition.from_json(position) for number, position in state["positions"].items()}


def with_named_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state, also of an earlier version, in which the position in a source was a list."""
    return {**state, "positions": {number: row.to_json() for number, row in positions_in(state).items()}}


def steps(corpus: Corpus, spec: BatchSpec, positions: Positions | None, retries: Retries) -> Iterator[Step]:
    """The optimizer steps from `positions`; None: from the start."""
    return retries.over(lambda last: steps_without_retries(corpus, spec, last[1] if last else positions))


def steps_without_retries(corpus: Corpus, spec: BatchSpec, positions: Positions | None) -> Iterator[Step]:
    rows, size = rows_at(positions, corpus, spec), spec.local_batch_size
    at_once = min(len(rows), MOST_ROWS_AT_ONCE)
    remote = any(source.is_remote for source in corpus.sources)
    with ThreadPool(at_once) if remote else nullcontext() as threads:
        while True:
            if corpus.passed_over:
                pass_over(rows, threads)
            turns = take_turns(rows, spec.rows_per_step)
            sources = [row.source for row in turns]
            windows = next_windows(turns, threads)
            parts = [slice(first, first + size) for first in range(0, len(windows), size)]
            batches = [build_batch(windows[part], spec, sources[part]) for part in parts]
            yield batches, positions_of(rows)


def pass_over(rows: Sequence[Row], threads: ThreadPool | None) -> None:
    """Draws what is in `Corpus.passed_over`, if that is next."""
    while skip := next((skip for skip in rows[0].corpus.passed_over if rows[0].windows + 1 in skip), None):
        doing = f"training.skip_steps: passing over the data of steps {rows[0].windows + 1} to {skip.stop - 1}"
        logger.info(doing)
        for _ in Waiting.over(range(rows[0].windows + 1, skip.stop), doing, "steps"):
            next_windows(rows, threads)
            for row in rows:
                row.passed_over += 1


def take_turns(rows: Sequence[Row], per_step: int) -> Sequence[Row]:
    """The rows whose turn it is."""
    if len(rows) == per_step:
        return rows
    first = rows[0].turn * per_step % len(rows)
    for row in rows:
        row.turn += 1
    return rows[first : first + per_step]


def state_of(positions: Mapping[str, Any]) -> dict[str, Any]:
    """Of positions as JSON. `epoch` is the number of complete epochs of all rows, for display."""
    return {"epoch": min(int(position["epoch"]) for position in positions.values()), "positions": positions}


# State entry -> the config key that determines it.
IDENTITY_KEYS = {
    "data": "training.dataset, dataset_path or dataset_mixture, or the files there",
    "content": "the content of files of the data, whose names and sizes are the same",
    "tokenizer": "model.tokenizer_path",
    "seed": "training.seed",
    "shuffle": "training.shuffle",
    "hold_out": "validation.enabled (which holds out documents)",
    "seq_len": "training.seq_len",
    "cut_for": "training.seq_len of the first stage, for which text without documents is cut",
    "global_batch_size": "training.global_batch_size",
    "packing": "training.packing",
    "chat": "training.train_on, chat_template or long_conversations, or the template",
}


def check_data_identity(now: Mapping[str, Any], state: Mapping[str, Any], rows: int) -> None:
    saved = {"cut_for": now["cut_for"] and state.get("seq_len"), **state}
    # A state of an earlier version, or data in an object store, has none.
    if not (now["content"] and saved.get("content")):
        saved["content"] = now["content"]
    same_ids = now["tokenizer_ids"] == saved.get("tokenizer_ids")  # two files may hold the same tokenizer
    differ = [
        f"{key} (now {now.get(entry)}, in the checkpoint {saved.get(entry)})"
        for entry, key in IDENTITY_KEYS.items()
        if now.get(entry) != saved.get(entry) and not (entry == "tokenizer" and same_ids)
    ]
    if differ or (saved_rows := len(saved.get("positions", {}))) != rows:
        raise CheckpointError(
            "The checkpoint's data position does not match this run: "
            f"{'; '.join(differ) or f'rows are missing: the checkpoint has {saved_rows} of {rows}'}. Change it back, "
            "or restart the data with --checkpoint.exclude_from_loading=dataloader."
        )


def build_loader(
    training: Training,
    tokenizer: Tokenizer,
    *,
    dp_rank: int,
    dp_size: int,
    global_batch_size: int,
    hold_out: bool,
    pin_memory: bool = False,
    prefetch: int = PREFETCHED_STEPS,
    run: DataOfRun | None = None,
) -> Loader:
    """The training data of one data-parallel rank.

    Args:
        dp_rank, dp_size: rank and number of ranks that read different rows.
        global_batch_size: sequences in an optimizer step over all ranks.
        hold_out: leave out what `build_validation_loader` takes from the training data.
        prefetch: number of optimizer steps.
        run: what all stages have in common; None: there is only this one.

    Raises:
        ConfigError: the rows do not divide into batches and ranks, or the data set is unknown.
        DataError: the data cannot be used.
    """
    run = run or DataOfRun(global_batch_size, training.seq_len, hold_out)
    local = training.local_batch_size
    spec = build_batch_spec(
        training, global_batch_size, local, dp_rank, dp_size, pin_memory, tokenizer.eos_id, run.rows
    )
    spec = replace(spec, mtp_layers=training.mtp_layers)
    sources, data = training_sources(training, run, tokenizer)
    seed = training.seed if training.shuffle else None
    stream, passed_over = load(PACKINGS[training.packing]), step_ranges(training.skip_steps)
    marked = training.train_on is not None
    corpus = Corpus(sources, tokenizer, run.rows, training.seq_len, seed, stream, passed_over, marked)
    identity = {
        **data,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_ids": tokenizer.ids_fingerprint,
        "seed": training.seed,
        "shuffle": training.shuffle,
        "hold_out": run.hold_out,
        "seq_len": training.seq_len,
        "global_batch_size": global_batch_size,
        "packing": training.packing,
        **({"chat": load("torchtitan.data.conversations:chat_for")(tokenizer, training).identity} if marked else {}),
    }
    return Loader(corpus, spec, identity, prefetch, training.retry_seconds)
