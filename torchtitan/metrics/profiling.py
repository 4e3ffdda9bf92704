"""Traces of time (Chrome format, any device) and of memory (CUDA) during a run."""

from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchtitan.config.output import Profiling
from torchtitan.errors import counted
from torchtitan.logging import logger
from torchtitan.protocols import Hook

WARMUP_STEPS = 3  # discarded steps before each trace, or it would show the profiler's own startup
MAX_MEMORY_EVENTS = 100_000  # allocations and frees that a snapshot covers


class Profiler(Hook):
    """A hook; use it as a context around the training loop too. It does nothing if both keys are off.

    With `enable_profiling`, every step N that is a multiple of `profile_freq` is written to
    `<dump_folder>/<save_traces_folder>/iteration_N/rankR_trace.json`, for chrome://tracing or Perfetto. With
    `enable_memory_snapshot`, `<dump_folder>/<save_memory_snapshot_folder>/iteration_N/rankR_memory_snapshot.pickle`
    is written at the same steps, and `iteration_N_oom/...` when the device runs out of memory in step N, for
    https://pytorch.org/memory_viz.

    The `busy` steps use torch's profiler for something else, and get no trace: two profilers at a time crash the
    process. `checks.config_checks` has refused memory snapshots on a CPU.
    """

    def __init__(
        self,
        profiling: Profiling,
        dump_folder: str | Path,
        *,
        rank: int,
        device_type: str,
        start_step: int,
        busy: Collection[int] = (),
    ) -> None:
        self.freq = profiling.profile_freq
        self.rank = rank
        self.finished_step = start_step
        self.traces = Path(dump_folder) / profiling.save_traces_folder
        self.snapshots = Path(dump_folder) / profiling.save_memory_snapshot_folder
        self.traces_written = 0
        self.snapshotting = profiling.enable_memory_snapshot
        self.profile: profile | None = None
        if profiling.enable_profiling:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device_type == "cuda")
            self.profile = profile(
                activities=activities,
                schedule=trace_schedule(start_step, self.freq, busy),
                on_trace_ready=self._save_trace,
                record_shapes=True,
                acc_events=False,
            )

    def __enter__(self) -> "Profiler":
        if self.profile is not None:
            logger.info(f"profiling one step of every {self.freq}; writing traces to {self.traces}")
            self.profile.__enter__()
        if self.snapshotting:
            logger.info(f"recording memory; writing a snapshot every {counted(self.freq, 'step')} to {self.snapshots}")
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        return self

    def after_step(self, run: Any = None) -> None:
        self.finished_step += 1
        if self.profile is not None:
            self.profile.step()
        if self.snapshotting and self.finished_step % self.freq == 0:
            self._save_snapshot(f"iteration_{self.finished_step}")

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.snapshotting:
            if isinstance(error, torch.OutOfMemoryError):
                self._save_snapshot(f"iteration_{self.finished_step + 1}_oom")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.profile is not None:
            # Stopping would hand over the unfinished step; a trace of it would mislead.
            self.profile.on_trace_ready = None
            self.profile.__exit__(error_type, error, trace)
            if error is None and self.traces_written == 0:
                logger.warning(
                    f"no trace was written: the run ended at step {self.finished_step}, before the next multiple of "
                    f"profiling.profile_freq ({self.freq}); lower it"
                )

    def _save_trace(self, finished: profile) -> None:
        path = self.traces / f"iteration_{self.finished_step}" / f"rank{self.rank}_trace.json"
        self.traces_written += 1
        _write(path, finished.export_chrome_trace)

    def _save_snapshot(self, name: str) -> None:
        _write(self.snapshots / name / f"rank{self.rank}_memory_snapshot.pickle", torch.cuda.memory._dump_snapshot)


def _write(path: Path, write: Callable[[str], object]) -> None:
    """Writes a file; failing to do so does not end the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path))
    except (OSError, RuntimeError) as error:
        logger.error(f"{path} cannot be written ({error}). Training continues.")
    else:
        logger.info(f"wrote {path}")


def trace_schedule(start_step: int, freq: int, busy: Collection[int]) -> Callable[[int], ProfilerAction]:
    """Records the steps that are multiples of `freq`, counted from the start of the run even after a resume. Neither a
    trace nor its warm-up overlaps a busy step; after one, a warm-up may be shorter."""

    def action(steps_done: int) -> ProfilerAction:
        step = start_step + steps_done + 1
        next_trace = step + -step % freq
        if any(step <= other <= next_trace for other in busy):
            return ProfilerAction.NONE
        if step % freq == 0:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step % freq >= freq - WARMUP_STEPS else ProfilerAction.NONE

    return action
