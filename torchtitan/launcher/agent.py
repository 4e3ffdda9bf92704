"""torchrun's agent of a machine, with words of its own: which process failed, and what happens then."""

import os
import signal
import sys
from types import FrameType
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from torchtitan.compat.elastic import LocalElasticAgent
from torchtitan.errors import EXIT_STATUS, INTERRUPTED
from torchtitan.launcher.signals import (
    LAUNCHER,
    STARTED_AGAIN,
    STOP_SIGNALS,
    exit_before_start,
    ignore_stop_signals,
    set_signal_handlers,
)

LAST_WORDS = 6.0  # seconds; above what a rank takes to find out which other rank is gone


class Agent(LocalElasticAgent):
    """Starts this machine's processes and watches them; on a failure starts them again, while restarts are left.

    A scheduler's announcement that it will take the machine away is handed on. The processes save and end by
    themselves, however long that takes, while torchrun would kill them after 30 s.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked = 0  # the signal that the run ends for
        self._starting = False
        os.environ[LAUNCHER] = str(os.getpid())
        set_signal_handlers(STOP_SIGNALS, self._forward)

    def run(self, *arguments: Any) -> RunResult:
        try:
            return super().run(*arguments)
        finally:
            ignore_stop_signals()  # how the processes have ended is what counts

    def _forward(self, number: int, frame: FrameType | None = None) -> None:
        self._asked = number
        state = self._worker_group.state
        if state == WorkerState.HEALTHY:
            self._remaining_restarts = 0
            for handler in cast(SubprocessContext, self._pcontext).subprocess_handlers.values():
                handler.proc.send_signal(number)  # to none that has ended
        elif state in (WorkerState.INIT, WorkerState.STOPPED) and not self._starting:
            exit_before_start(number)  # there are no processes
        # Else they are being started, and get it then; or they have ended, and are not started again.

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self._asked:
            exit_before_start(self._asked)
        super()._initialize_workers(worker_group)
        self._starting = False
        if self._asked:
            self._forward(self._asked)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starting = True
        # A KeyboardInterrupt while Python itself starts would be a traceback: train.py takes Ctrl-C when it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _invoke_run(self, *arguments: Any) -> RunResult:
        try:
            return super()._invoke_run(*arguments)
        except RendezvousError:  # the launcher that keeps the store of them all has ended
            self._await_last_words()
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            rank, failure = root_cause(result.failures)
            # A mistake of the user's is not mended by trying again, and a run that was asked to end is not wanted.
            if failure.exitcode in (EXIT_STATUS, INTERRUPTED, *(128 + number for number in STOP_SIGNALS)):
                self._remaining_restarts = 0
            message = _message(rank, failure.exitcode, self._remaining_restarts)
            if message and not (self._asked and -failure.exitcode in STOP_SIGNALS):
                print(message, file=sys.stderr)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        os.environ[STARTED_AGAIN] = "yes"
        if worker_group.state == WorkerState.HEALTHY:
            print("Another machine starts its processes again, and so does this one.", file=sys.stderr)
            self._await_last_words()
        super()._restart_workers(worker_group)

    def _await_last_words(self) -> None:
        """A process on another machine has failed. Ours are about to notice, and name it."""
        if self._pcontext is not None:
            self._pcontext.wait(LAST_WORDS)


def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that was killed (it could not say so itself, and the others failed for want of it), or else one that
    found a mistake of the user's, or else the one that failed first. What is ended by SIGTERM, or is killed later, was
    ended by torchrun."""
    first = min(failure.timestamp for failure in failures.values())  # whole seconds

    def later(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        killed = failure.exitcode < 0 and -failure.exitcode not in STOP_SIGNALS and failure.timestamp <= first + 1
        return not killed, failure.exitcode != EXIT_STATUS, failure.timestamp

    return min(failures.items(), key=later)


def _message(rank: int, exitcode: int, restarts: int) -> str:
    """'' where the process has said itself what was wrong, and nothing follows."""
    message = f"Error: the process of rank {rank} "
    if exitcode >= 0:
        message += f"ended with status {exitcode}."
    else:
        name = signal.Signals(-exitcode).name
        message += f"was ended by {name}{' (often: out of memory)' if name == 'SIGKILL' else ''}."
    if restarts:
        return f"{message} All processes start again; restarts left after this one: {restarts - 1}."
    return message if exitcode < 0 else ""
