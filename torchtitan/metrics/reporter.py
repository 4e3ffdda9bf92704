"""`MetricsReporter` measures step times and reports every `log_freq` steps."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.config.output import Metrics
from torchtitan.device import Device
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.metrics.flops import Peak, describe_mfu
from torchtitan.metrics.writers import JSONLWriter, TensorBoardWriter, Value, Writer
from torchtitan.protocols import Hook

if TYPE_CHECKING:
    from tqdm import tqdm

Reading = float | int | torch.Tensor | Callable[[], float | int | torch.Tensor]
"""A number, a one-element tensor, or a function that returns one of them. Read only when a report is due."""

Record = dict[str, Value]

SLOW_RATIO, SLOW_SECONDS = 1.3, 60.0  # a rank that stays so much slower than the others for so long is named


@dataclass(eq=False)
class MetricsReporter(Hook, AbstractContextManager["MetricsReporter"]):
    """Reports at step 1, every `log_freq` steps, and at the last step. Every rank creates one.

    A step costs two clock readings: tensors are read, which waits for the device, only when a report is due.

    A report holds `loss` and `grad_norm` (of this step), `lr`, `tokens_per_second` (per device), `mfu` (0 to 1),
    `step_seconds`, `data_wait_share` (fraction of the time, 0 to 1), `peak_memory_bytes` and `memory_share` (fraction
    of the device's memory, 0 to 1), `tokens_seen`, and anything else passed to `step`. Times and peak memory cover the
    steps since the previous report. An unknown or non-finite number is None. Validation has its own entries, with
    `validation_loss` and without `loss`, and so has evaluation.

    Raises a ConfigError if the dump folder is not writable, or a package is not installed.
    """

    section: Metrics  # [metrics] of the configuration
    dump_folder: Path  # receives `metrics.jsonl` (from rank 0) and the TensorBoard folder
    _: KW_ONLY
    rank: int
    world_size: int
    total_steps: int
    start_step: int
    start_tokens: int  # seen up to `start_step`; the batch may have had another size
    tokens_per_step: int
    flops_per_token: float
    peak: Peak | None  # one device's; MFU is None if this is unknown, and while a measured peak is too low
    device: Device
    trackers: Sequence[Writer] = ()  # they outlive the reporter: each stage has its own
    stages: Sequence[tuple[int, str]] = ()  # last step and title of each, for TensorBoard
    start_epochs: Mapping[str, int] = field(default_factory=dict)  # source -> epochs when this start began
    waited: Callable[[], float] = lambda: 0.0  # seconds that this rank has waited in collectives so far
    hosts: Sequence[str] = ()  # all ranks' hosts

    def __post_init__(self) -> None:
        self._epochs = self.start_epochs
        self._slow: tuple[int, float] | None = None  # a rank, and since when; inf: the user knows
        self.color = not self.section.disable_color_printing and sys.stdout.isatty()
        self._own = make_writers(self.section, self.dump_folder, self.rank, self.start_step, self.stages)
        self.writers = [*self.trackers, *self._own]
        self._described = self.peak.flops if self.peak else 0.0
        self._stack = ExitStack()
        self._bar: tqdm | None = None
        if self.rank == 0 and sys.stderr.isatty():
            from tqdm import tqdm as progress_bar
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._stack.enter_context(logging_redirect_tqdm([logger]))  # log lines go above the bar
            bar = progress_bar(total=self.total_steps, initial=self.start_step, unit="step", dynamic_ncols=True)
            self._bar = self._stack.enter_context(bar)
        self._started = perf_counter()
        self._evaluation_seconds = 0.0
        self._first_report: tuple[int, float] | None = None  # step and time; the time left is estimated from here
        self._start_window(self.start_step)

    def __exit__(self, *_: object) -> None:
        """Closes the files and the progress bar."""
        self._stack.close()
        for writer in self._own:
            writer.close()

    def due(self, step: int) -> bool:
        """Whether `step` ends with a report; the same on every rank."""
        return step == 1 or step % self.section.log_freq == 0 or step == self.total_steps

    def tokens_seen(self, step: int) -> int:
        """Tokens of all steps up to `step`."""
        return self.start_tokens + (step - self.start_step) * self.tokens_per_step

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Wraps getting a batch: its time is the data wait."""
        start = perf_counter()
        try:
            yield
        finally:
            self._data_wait_seconds += perf_counter() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Wraps what is not training (checkpoints, validation), to exclude its time. Waits for the device, so that it
        starts when the steps before it have ended."""
        self.device.synchronize()
        start, waited = perf_counter(), self.waited()
        try:
            yield
        finally:
            self.device.synchronize()
            self._paused_seconds += perf_counter() - start
            self._waited_before += self.waited() - waited

    def step(self, step: int, *, loss: Reading, grad_norm: Reading, lr: Reading, **extra: Reading) -> Record | None:
        """Call at the end of each step. Returns the report, if one was due. Readings that are functions are called on
        every rank in the given order, so they may be collective."""
        if self._bar is not None:
            self._bar.update(1)
        if not self.due(step):
            return None
        record: Record = {"loss": read(loss), "grad_norm": read(grad_norm), "lr": read(lr)}
        others = {name: read(reading) for name, reading in extra.items()}
        # After reading, which waits for the device: the measured time then covers finished work.
        record |= self._measure(step) | others
        logger.info(self._line(step, record))
        self._write(step, record)
        self._start_window(step)
        return record

    def epochs(self, step: int, epochs: Mapping[str, int]) -> dict[str, float]:
        """How often each source has been read, as readings `epoch/SOURCE` for `step`. Logs where one begins again."""
        for name, epoch in epochs.items():
            if epoch > self._epochs.get(name, 0):
                logger.info(f"step {step} | {name}: all documents are read, epoch {epoch + 1} has begun")
        self._epochs = dict(epochs)
        return {f"epoch/{name}": epoch for name, epoch in epochs.items()}

    def own_seconds(self, step: int) -> float:
        """This rank's mean step time since the previous report, without pauses and collectives. Synchronizes."""
        self.device.synchronize()
        waited = self.waited() - self._waited_before
        return max(self._window_seconds() - waited, 0.0) / (step - self._window_step)

    def slowest_rank(self, step: int, own_seconds: Sequence[float]) -> dict[str, float]:
        """From the `own_seconds` of all ranks: which is slowest, how many times the median of the others it took, and
        for which share of the time these waited for it. Empty for one rank. Names a rank that stays slow."""
        if len(own_seconds) < 2:
            return {}
        rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
        others = [*own_seconds[:rank], *own_seconds[rank + 1 :]]
        ratio = own_seconds[rank] / max(median(others), 1e-9)
        share = (own_seconds[rank] - fmean(others)) * (step - self._window_step) / self._window_seconds()
        if ratio < SLOW_RATIO or self._window_step == self.start_step:  # the first window may have compiled
            self._slow = None
        elif self._slow is None or self._slow[0] != rank:
            self._slow = rank, self._window_start
        if self._slow is not None and perf_counter() - self._slow[1] > SLOW_SECONDS:
            self._slow = rank, math.inf
            if self.rank == 0:
                logger.warning(
                    f"step {step} | rank {rank} on {self.hosts[rank]} has been {ratio:.1f} times slower than the "
                    f"others for a minute, which wait {share:.0%} of the time for it: look for other processes, heat "
                    "or slow data there (with pipeline stages, for layers that are divided unequally)"
                )
        return {"slowest_rank": rank, "slowest_rank_ratio": ratio, "slowest_rank_wait_share": share}

    def after_step(self, run: Any = None) -> None:
        """Measures the peak in some of the first steps, and while it is too low."""
        if self.peak is None or not self.peak.uncertain:
            return
        with self.pause():
            self.peak.measure()
        if not self.peak.uncertain and self.peak.flops > 1.05 * self._described:
            logger.info(describe_mfu(self.peak))

    def validation(self, step: int, loss: Reading) -> Record:
        """Reports the loss on held-out text after `step`, as a separate entry with `validation_loss`."""
        record: Record = {"validation_loss": read(loss), "tokens_seen": self.tokens_seen(step)}
        logger.info(f"step {step} | validation loss {record['validation_loss']:.4f}")
        self._write(step, record)
        return record

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]], table: str, seconds: float) -> Record:
        """Reports the metrics of each task after `step`, as a separate entry with keys `TASK/METRIC`, and the time that
        evaluating took: `evaluation_seconds`, and `evaluation_share` of the time since this process began to train."""
        self._evaluation_seconds += seconds
        share = self._evaluation_seconds / max(perf_counter() - self._started, 1e-9)
        record: Record = {
            f"{task}/{name}": value for task, metrics in results.items() for name, value in metrics.items()
        }
        record |= {"evaluation_seconds": seconds, "evaluation_share": share, "tokens_seen": self.tokens_seen(step)}
        logger.info(f"step {step} | evaluation took {seconds:.1f} s; {share:.1%} of the time so far\n{table}")
        self._write(step, record)
        return record

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports what a hook has returned after `step`, as a separate entry."""
        logger.info(" | ".join([f"step {step}", *(f"{name} {value:.5g}" for name, value in metrics.items())]))
        self._write(step, {**metrics, "tokens_seen": self.tokens_seen(step)})

    def expert_load(self, step: int, load: Mapping[str, Sequence[float]]) -> None:
        """Adds an entry with the load of each expert, by layer, to `metrics.jsonl`."""
        rounded = {layer: [round(share, 4) for share in experts] for layer, experts in load.items()}
        for writer in self.writers:
            if isinstance(writer, JSONLWriter):
                writer.write(step, {"expert_load": rounded})

    def samples(self, step: int, samples: Sequence[tuple[str, str | None]]) -> None:
        """Shows prompts with their continuations, in the log, in TensorBoard and by trackers."""
        for number, (prompt, text) in enumerate(samples):
            if text is None:
                logger.info(f"step {step} | no sample of {prompt!r}: the model's outputs are not finite")
                continue
            logger.info(f"step {step} | sample of {prompt!r}\n{prompt}{text}")
            for writer in self.writers:
                writer.write_text(step, f"sample {number + 1}", prompt + text)

    def _start_window(self, step: int) -> None:
        self._window_step = step
        self._window_start = perf_counter()
        self._paused_seconds = 0.0
        self._data_wait_seconds = 0.0
        self._waited_before = self.waited()
        self.device.reset_peak_memory()

    def _window_seconds(self) -> float:
        return perf_counter() - self._window_start - self._paused_seconds

    def _measure(self, step: int) -> Record:
        seconds = self._window_seconds()
        steps = step - self._window_step
        tokens_per_second = steps * self.tokens_per_step / seconds / self.world_size
        memory = self.device.peak_memory_bytes()
        return {
            "tokens_per_second": tokens_per_second,
            "mfu": self.peak.mfu(tokens_per_second * self.flops_per_token) if self.peak else None,
            "step_seconds": seconds / steps,
            "data_wait_share": self._data_wait_seconds / seconds,
            "peak_memory_bytes": memory,
            "memory_share": memory / self.device.memory_capacity_bytes(),
            "tokens_seen": self.tokens_seen(step),
        }

    def _write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            if value is not None and not math.isfinite(value):
                logger.warning(f"step {step}: {name} is {value}; written as null")
                record[name] = None
        for writer in self.writers:
            writer.write(step, record)

    def _line(self, step: int, record: Record) -> str:
        def paint(code: int, text: str) -> str:
            return f"\033[{code}m{text}\033[0m" if self.color else text

        mfu = record["mfu"]
        columns = [
            paint(1, f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"),
            paint(32, f"loss {record['loss']:.4f}"),
            f"grad norm {record['grad_norm']:.3f}",
            f"lr {record['lr']:.2e}",
            paint(34, f"{record['tokens_per_second']:,.0f} tokens/s{'/device' if self.world_size > 1 else ''}"),
            paint(36, f"MFU {'unknown' if mfu is None else format(mfu, '.1%')}"),
            f"memory {(record['peak_memory_bytes'] or 0) / 2**30:.2f} GiB ({record['memory_share']:.0%})",
            f"data wait {record['data_wait_share']:.1%}",
        ]
        if "stage" in record:
            columns.append(f"stage {record['stage']}")
        if "padding_share" in record:
            columns.append(f"padding {record['padding_share']:.1%}, {record['cut_share']:.1%} of documents cut")
        if "expert_load_max" in record:
            columns.append(f"expert load {record['expert_load_min']:.2f} to {record['expert_load_max']:.2f}")
        if "slowest_rank" in record:
            host = self.hosts[int(record["slowest_rank"] or 0)]
            columns.append(f"slowest rank {record['slowest_rank']} ({host}) {record['slowest_rank_ratio']:.2f}x")
            columns[-1] += f", others wait {record['slowest_rank_wait_share']:.0%}"
        if left := self._time_left(step):
            columns.append(left)
        return " | ".join(columns)

    def _time_left(self, step: int) -> str:
        """From the mean pace since the first report, including pauses; earlier steps had startup costs."""
        now = perf_counter()
        if self._first_report is None:
            self._first_report = (step, now)
            return ""
        first_step, first_time = self._first_report
        seconds = (now - first_time) / (step - first_step) * (self.total_steps - step)
        return f"{duration(seconds)} left" if step < self.total_steps else ""


def read(reading: Reading) -> float | int:
    """The number itself. Waits for the device if it is a tensor there."""
    value = reading() if callable(reading) else reading
    return value.item() if isinstance(value, torch.Tensor) else value


def duration(seconds: float) -> str:
    """m:ss, h:mm:ss, or days and hours."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def make_writers(
    metrics: Metrics,
    dump_folder: Path,
    rank: int,
    start_step: int | None,
    stages: Sequence[tuple[int, str]] = (),
) -> list[Writer]:
    """The writers of this rank. No file of an earlier run changes before all are made: a package may be missing."""
    writers: list[Writer] = []
    try:
        dump_folder.mkdir(parents=True, exist_ok=True)
        if metrics.enable_tensorboard and (rank == 0 or metrics.save_for_all_ranks):
            folder = dump_folder / metrics.save_tb_folder / (f"rank_{rank}" if metrics.save_for_all_ranks else "")
            writers.append(TensorBoardWriter(folder, start_step, stages))
        if rank == 0:
            writers.append(JSONLWriter(dump_folder / "metrics.jsonl", start_step))
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder: metrics cannot be written to {dump_folder} ({error.strerror or error}); "
            "choose a writable folder."
        ) from error
    return writers
