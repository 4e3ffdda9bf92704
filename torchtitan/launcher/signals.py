"""Signals: Ctrl-C ends a process at once; SIGTERM, SIGUSR1 and SIGHUP ask the run to save and end at the next step
boundary."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchtitan.errors import INTERRUPTED
from torchtitan.launcher.progress import Progress

# `nohup` has a command ignore SIGHUP, and so it does. Read before a handler is set.
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    *([] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]),
)
# Variables that a launcher sets for the processes that it starts: its own, and that this start is not the first.
LAUNCHER, STARTED_AGAIN = "TORCHTITAN_LAUNCHER", "TORCHTITAN_STARTED_AGAIN"
GIVEN_UP = signal.SIGUSR2  # to the launcher, of a rank that was asked to end before it could tell the others
GRACE = 10  # seconds; torchrun and Kubernetes kill after 30
OUTPUT = 1  # seconds for a message: whoever reads the screen may have stopped to


class Stop:
    """Whether the run is to save and end: asked for by a signal to any rank, then agreed on by all.

    A run that comes to no step boundary ends all the same: GRACE seconds after the signal before its first step is done
    (it loads or compiles, and there is nothing to save); later, GRACE seconds after the step should have been done. A
    validation or a save may take its time. All this happens in threads: the main thread may be inside a long GEMM, a
    collective that waits for a rank that is gone, or an import that would swallow a KeyboardInterrupt.

    Attributes:
        requested: the signal that this process got, or that another rank has passed on; 0 for none.
        agreed_on: the signal that all ranks end for; 0 for none.
        progress: of the steps; the trainer says when they begin and end.
        failed: set it where the process is about to end anyway; then a signal ends it at once.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.requested = 0
        self.agreed_on = 0
        self.progress = Progress()
        self.failed = False
        self._group: Any = None

    def listen(self) -> None:
        """From now on signals are taken."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)

        def wait() -> None:
            while True:
                self._take(os.read(read_end, 1)[0])

        threading.Thread(target=wait, daemon=True).start()
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # written to by the signal itself, not by Python
        set_signal_handlers((signal.SIGINT, *STOP_SIGNALS), lambda *_: None)

    def _take(self, number: int) -> None:
        if number == signal.SIGINT or self.failed:
            # Every file is written in one piece or flushed line by line, so there is nothing to bring to an end.
            name = signal.Signals(number).name
            self._say(f"\nStopped by {name}. The same command goes on from the last checkpoint, if there is one.")
            exit_now(INTERRUPTED)
        if number in STOP_SIGNALS:
            self.request(number)

    def request(self, number: int) -> None:
        """That the run ends for this signal, to whichever rank it was sent. Only the first counts."""
        if self.requested:
            return
        self.requested = number
        threading.Thread(target=self._watch_grace_period, daemon=True).start()
        self._say(f"\n{self.name}: the run ends after this step, and saves it if checkpoints are on.")

    def _watch_grace_period(self) -> None:
        asked = time.monotonic()
        while not self.agreed_on:
            time.sleep(0.1)
            began = self.progress.began
            if not self.has_trained:
                if time.monotonic() - asked > GRACE:
                    self.give_up()
            elif began is not None and time.monotonic() - max(asked, began) > GRACE + self.progress.longest_step:
                self.give_up()

    def give_up(self) -> None:
        """Ends the process without a save."""
        if not self.has_trained:
            self._say(f"Stopped by {self.name} before a step was done. The same command starts it again.")
            if self._group is None and os.environ.get(LAUNCHER) == str(os.getppid()):
                os.kill(os.getppid(), GIVEN_UP)  # the other ranks do not know, and would wait for this one
            exit_now(0)
        self._say(
            f"Stopped by {self.name} inside a step, which does not end, so nothing is saved. The same command goes on "
            "from the last checkpoint, if there is one."
        )
        exit_now(128 + self.requested)

    def _say(self, message: str) -> None:
        if self.rank == 0:
            with_timeout(OUTPUT, lambda: print(message, file=sys.stderr, flush=True))

    @property
    def has_trained(self) -> bool:
        """Whether a step is done, so that there is something to save."""
        return self.progress.steps > 0

    @property
    def name(self) -> str:
        """Of the signal."""
        return signal.Signals(self.agreed_on or self.requested).name

    def connect(self) -> None:
        """Once the process group is there: a group over host memory to agree in, so that no device is waited for."""
        import torch.distributed as dist

        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def agreed(self, reason: int = 0) -> bool:
        """Whether to end now: the same on every rank. Collective; call it on all at the same step boundaries. It costs
        an all-reduce of one number between hosts.

        Args:
            reason: of this rank to end without a signal, a number above theirs; 0 for none.
        """
        import torch
        import torch.distributed as dist

        if not self.agreed_on:
            request = torch.tensor(max(self.requested, reason), dtype=torch.int32)
            dist.all_reduce(request, dist.ReduceOp.MAX, self._group)
            self.agreed_on = int(request)
        return self.agreed_on > 0


def set_signal_handlers(
    numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> None:
    for number in numbers:
        signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """For a process that is about to end well: Python gives signals their defaults back while it ends."""
    set_signal_handlers(STOP_SIGNALS, signal.SIG_IGN)


def exit_with_launcher() -> None:
    """A process that torchrun started does not outlive it: a new start of the command would meet it in its folder."""
    parent = os.getppid()  # another than the launcher where that has ended already
    launcher = int(os.environ.get(LAUNCHER, parent))

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            while os.getppid() == parent:
                os.kill(launcher, 0)
                time.sleep(1)
        exit_now(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_before_start(number: int) -> None:
    """Ends a launcher whose processes have not begun, so that there is nothing to save."""
    with contextlib.suppress(OSError):  # in a signal handler, so perhaps inside a print
        os.write(2, f"Stopped by {signal.Signals(number).name} before the run has begun.\n".encode())
    os._exit(0)


def exit_now(status: int) -> None:
    """Ends the process at once: threads and groups of a run that has failed are not waited for."""
    with_timeout(OUTPUT, sys.stdout.flush)
    with_timeout(OUTPUT, sys.stderr.flush)
    os._exit(status)


def with_timeout(seconds: float, action: Callable[[], Any]) -> None:
    """Does it in a thread, and goes on after so long. What cannot be written is lost."""

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
