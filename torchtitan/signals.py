"""Signals: Ctrl-C ends a process at once; SIGTERM and SIGUSR1 ask the run to save and end at the next step boundary."""

import os
import signal
import sys
import threading
from typing import Any

from torchtitan.errors import INTERRUPTED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
GRACE = 10  # seconds until a run that has done no step ends all the same; torchrun kills after 30


class Stop:
    """Whether the run is to save and end: asked for by a signal to any rank, then agreed on by all.

    Attributes:
        requested: the signal that this process got; 0 for none.
        agreed_on: the signal that all ranks end for; 0 for none.
        has_trained: whether a step is done, so that there is something to save; set it.
        failed: set it where the process is about to end anyway; then a signal ends it at once.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.requested = 0
        self.agreed_on = 0
        self.has_trained = False
        self.failed = False
        self._group: Any = None

    def listen(self) -> None:
        """From now on signals are taken. In a thread: the main thread may be inside a collective that waits for a rank
        that is gone, or inside an import that would swallow a KeyboardInterrupt."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)

        def wait() -> None:
            while True:
                self._take(os.read(read_end, 1)[0])

        threading.Thread(target=wait, daemon=True).start()
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # written to by the signal itself, not by Python
        for number in (signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, lambda *_: None)

    def _take(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT or self.failed:
            # Every file is written in one piece or flushed line by line, so there is nothing to bring to an end.
            self._say(f"\nStopped by {name}. The same command goes on from the last checkpoint, if there is one.")
            end(INTERRUPTED)
        if self.requested:
            return  # it is at it
        self._say(f"\n{name}: the run ends after this step, and saves it if checkpoints are on.")
        self.requested = number
        timer = threading.Timer(GRACE, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        """Loading or compiling takes longer than whoever sent the signal may wait, and there is nothing to save."""
        if not (self.has_trained or self.agreed_on):
            self.end_untrained()

    def end_untrained(self) -> None:
        self._say(f"Stopped by {self.name} before a step was done. The same command starts it again.")
        end(0)

    def _say(self, message: str) -> None:
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)

    @property
    def name(self) -> str:
        """Of the signal."""
        return signal.Signals(self.agreed_on or self.requested).name

    def connect(self) -> None:
        """Once the process group is there: a group over host memory to agree in, so that no device is waited for."""
        import torch.distributed as dist

        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def agreed(self) -> bool:
        """Whether to end now: the same on every rank. Collective; call it on all at the same step boundaries. It costs
        an all-reduce of one number between hosts."""
        import torch
        import torch.distributed as dist

        if not self.agreed_on:
            request = torch.tensor(self.requested, dtype=torch.int32)
            dist.all_reduce(request, dist.ReduceOp.MAX, self._group)
            self.agreed_on = int(request)
        return self.agreed_on > 0


def end_unbegun(number: int) -> None:
    """Ends a launcher whose processes have not begun, so that there is nothing to save."""
    print(f"Stopped by {signal.Signals(number).name} before the run has begun.", file=sys.stderr)
    end(0)


def end(status: int) -> None:
    """Ends the process at once: threads and groups of a run that has failed are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
