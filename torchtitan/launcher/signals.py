"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: the run saves and exits at the next step boundary; a second Ctrl-C ends it."""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchtitan.errors import INTERRUPTED
from torchtitan.launcher.monitor import OUTPUT, Watcher, on_signal, watch, with_timeout
from torchtitan.launcher.progress import Progress

if TYPE_CHECKING:
    import torch.distributed as dist

# SIGHUP stays ignored under `nohup`. Read before a handler is set.
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    *([] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]),
)
# Environment variables that a launcher sets for its processes: its process id, and that this start is a restart.
LAUNCHER, STARTED_AGAIN = "TORCHTITAN_LAUNCHER", "TORCHTITAN_STARTED_AGAIN"
# A file in which a run that was stopped before its end leaves the step that it resumes from: whether to start it again.
STOPPED = "TORCHTITAN_STOPPED"
STARTER = "TORCHTITAN_STARTER"  # process id of a program that has started a launcher to train in its name
GIVEN_UP = signal.SIGUSR2  # a rank that was asked to stop, and exits before its first step, sends it to the launcher
GRACE = 10  # seconds; torchrun and Kubernetes kill after 30
LAST_CALL = 10  # seconds; some of them to ask whether the other ranks are alive
SECOND_SIGNAL_AFTER = 0.5  # seconds; sooner, Ctrl-C is the first one, which torchrun passes on beside the terminal


_last_calls: list[Callable[[int], object]] = []


@dataclass(eq=False)
class Stop:
    """Whether the run is to save and exit: requested by a signal to any rank, then agreed on by all.

    A run that reaches no step boundary exits anyway. Before its first step is done (it is loading or compiling, and has
    nothing to save), it exits GRACE seconds after the signal; later, GRACE seconds after the step should have ended. A
    validation or a save is not cut short.
    """

    rank: int = 0
    saves: bool = True  # whether there is something to save; if not, any signal ends this process at once
    requested: int = 0  # the signal that this process got or another rank passed on; 0 for none
    agreed_on: int = 0  # the signal that all ranks stop for; 0 for none
    unready: bool = False  # whether a rank said in the last agreement that it is not ready to go on
    failed: int = 0  # exit status of a process that is about to exit: a signal ends it at once; else 0
    group: "dist.ProcessGroup | None" = None  # gloo's, to agree in
    progress: Progress = field(default_factory=Progress)  # the trainer reports to it when steps begin and end
    step_on_disk: Callable[[], int | None] | None = None  # the newest checkpoint's step; None until that is known
    _first_signal: float | None = None

    def listen(self) -> None:
        """Starts to handle signals."""
        on_signal(self._take)
        # The launcher has blocked Ctrl-C; one that is waiting goes before the SIGTERM that the launcher sends next.
        set_signal_handlers((signal.SIGINT,), lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        set_signal_handlers(STOP_SIGNALS, lambda *_: None)

    def _take(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        if not self.saves:
            self._say(f"\nStopped by {signal.Signals(number).name}.")
            exit_now(128 + number)
        now = time.monotonic()
        # Signals to this process only: one that another machine got does not make the first Ctrl-C here the second.
        again = self._first_signal is not None and now - self._first_signal > SECOND_SIGNAL_AFTER
        if self.failed or (number == signal.SIGINT and (again or not self.has_trained)):
            # Files are written atomically or flushed line by line, so there is nothing to finish.
            self._say(f"\nStopped by {signal.Signals(number).name}. {self.on_disk}")
            exit_now(INTERRUPTED if number == signal.SIGINT else self.failed)
        self._first_signal = self._first_signal or now
        self.request(number)

    def request(self, number: int) -> None:
        """Requests that the run stop, for a signal to whichever rank. Only the first request counts."""
        if self.requested:
            return
        self.requested = number
        watch(self._grace_period())
        again = " Ctrl-C again ends it at once." if number == signal.SIGINT else ""
        self._say(
            f"\n{self.name}: the run stops after this step, and saves a checkpoint if checkpoints are enabled."
            f"{again} {self.on_disk}"
        )

    def _grace_period(self) -> Watcher:
        asked = time.monotonic()
        while not self.agreed_on:
            yield 0.1
            began = self.progress.began
            if not self.has_trained:
                if time.monotonic() - asked > GRACE:
                    self.give_up()
            elif began is not None and time.monotonic() - max(asked, began) > GRACE + self.progress.longest_step:
                self.give_up()

    def give_up(self) -> None:
        """Exits without saving."""
        with_timeout(OUTPUT, self.mark)
        if not self.has_trained:
            self._say(f"Stopped by {self.name} before the first step finished. Run the same command to start again.")
            if os.environ.get(LAUNCHER) == str(os.getppid()):
                os.kill(os.getppid(), GIVEN_UP)  # ranks that no heartbeat has told, as yet, would wait for this one
            exit_now(0)
        self._say(f"Stopped by {self.name} during a step that does not end, so nothing is saved. {self.on_disk}")
        exit_now(128 + self.requested)

    def mark(self) -> None:
        """Leaves word that the run is not finished (`STOPPED`). Raises an OSError if it cannot."""
        if self.rank == 0:
            _mark_stopped(self.step_on_disk() if self.step_on_disk else None)

    def _say(self, message: str) -> None:
        if self.rank == 0:
            with_timeout(OUTPUT, lambda: print(message, file=sys.stderr, flush=True))

    @property
    def on_disk(self) -> str:
        """Where the same command would resume, as far as this process knows."""
        if self.step_on_disk is None:
            return "The same command resumes from the last checkpoint, if there is one."
        step = self.step_on_disk()
        if step is None:
            return "This run has saved no checkpoint yet, so the same command starts again."
        return f"The checkpoint of step {step} is on disk, and the same command resumes from it."

    @property
    def has_trained(self) -> bool:
        """Whether a step is done, so that there is something to save."""
        return self.progress.steps > 0

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.agreed_on or self.requested).name

    def connect(self) -> None:
        """Once the process group exists: makes a gloo group to agree in, so that no GPU is waited for."""
        import torch.distributed as dist

        self.group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def agreed(self, reason: int = 0, ready: bool = True) -> bool:
        """Whether to stop now; the same on every rank. Collective: call it on all ranks at the same step boundaries. It
        costs an all-reduce of one number between hosts. `reason` is a number above all signal numbers, for which this
        rank stops without a signal, or 0; `ready` is whether this rank can go on."""
        import torch
        import torch.distributed as dist

        if not self.agreed_on:
            request = torch.tensor(2 * max(self.requested, reason) + (not ready), dtype=torch.int32)
            dist.all_reduce(request, dist.ReduceOp.MAX, self.group)
            self.agreed_on, self.unready = int(request) // 2, int(request) % 2 > 0
        return self.agreed_on > 0


def set_signal_handlers(
    numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> None:
    for number in numbers:
        signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """For a process about to exit successfully: Python restores the default handlers during shutdown."""
    set_signal_handlers(STOP_SIGNALS, signal.SIG_IGN)


def when_gone(process: int, act: Callable[[], object]) -> Watcher:
    """Calls `act` when this process or the parent has ended."""
    parent = os.getppid()  # not the launcher, if that has exited already
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(process, 0)
            yield 1.0
    act()


def _mark_stopped(step: int | None) -> None:
    if STOPPED in os.environ:
        Path(os.environ[STOPPED]).write_text(f"{step or 0}\n")


def exit_before_start(number: int) -> None:
    """Ends a launcher before its processes start: there is nothing to save."""
    with contextlib.suppress(OSError):  # runs in a signal handler, which may have interrupted a print
        _mark_stopped(None)
        os.write(2, f"Stopped by {signal.Signals(number).name} before the run started.\n".encode())
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)


@contextlib.contextmanager
def before_exit(call: Callable[[int], object]) -> Iterator[None]:
    """In this context `exit_now` first calls `call` with the exit status, and waits LAST_CALL seconds at most."""
    _last_calls.append(call)
    try:
        yield
    finally:
        _last_calls.remove(call)


def exit_now(status: int) -> None:
    """Exits at once, without waiting for the threads and process groups of a failed run."""
    for call in list(_last_calls):
        with_timeout(LAST_CALL, functools.partial(call, status))
    with_timeout(OUTPUT, sys.stdout.flush)
    with_timeout(OUTPUT, sys.stderr.flush)
    os._exit(status)
