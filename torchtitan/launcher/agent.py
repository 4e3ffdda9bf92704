"""torchrun, and its LocalElasticAgent, with concise errors: which process failed, and what happens next."""

import logging
import os
import signal
import socket
import sys
from subprocess import Popen
from types import FrameType
from typing import Any, cast

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher
from torch.distributed.run import main as torchrun

from torchtitan.compat.elastic import LocalElasticAgent
from torchtitan.errors import EXIT_STATUS, INTERRUPTED
from torchtitan.launcher.signals import (
    GIVEN_UP,
    LAUNCHER,
    STARTED_AGAIN,
    STOP_SIGNALS,
    exit_before_start,
    ignore_stop_signals,
    set_signal_handlers,
)

LAST_WORDS = 6.0  # seconds; longer than a rank takes to find out which other rank is gone
LOOPBACK = "127.0.0.1"


def run_torchrun(arguments: list[str]) -> int:
    """Runs torchrun with this module's agent and rendezvous. Returns the exit status."""
    for name in list(logging.root.manager.loggerDict):  # each logger has its own level
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    setattr(launcher, "LocalElasticAgent", Agent)  # noqa: B010  torchrun has no option for this
    setattr(launcher.rdzv_registry, "get_rendezvous_handler", find_rendezvous)  # noqa: B010
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        exitcode = root_cause(error.failures)[1].exitcode
        if -exitcode in STOP_SIGNALS:  # it arrived before the process could handle it
            exit_before_start(-exitcode)
        return exitcode if exitcode >= 0 else 128 - exitcode
    except RendezvousError as error:
        print(f"Error: the machines of this run could not connect, or lost their connection: {error}", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    except OSError as error:  # such as no disk space for torchrun's log folder
        print(f"Error: cannot start the processes: {error}.", file=sys.stderr)
        return EXIT_STATUS
    return 0


def find_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """torchrun's own rendezvous for several machines; a store on loopback for one, whatever the backend."""
    return get_rendezvous_handler(parameters) if parameters.max_nodes > 1 else OneMachine(parameters.run_id)


class OneMachine(StaticTCPRendezvous):
    """A store that listens only on loopback. torch would listen on all addresses, but accepts a given socket. It
    unpickles what it reads there, so whoever can reach the port runs code as this user."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        super().__init__(LOOPBACK, port, rank=0, world_size=1, run_id=run_id, timeout=60)
        self._store = TCPStore(LOOPBACK, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())


class Agent(LocalElasticAgent):
    """Starts and monitors this machine's processes; after a failure restarts them while restarts are left. Ctrl-C and a
    scheduler's preemption signal are forwarded. The processes then save and exit by themselves, however long that
    takes; torchrun would kill them after 30 s."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        spec = self._worker_group.spec
        if isinstance(spec.rdzv_handler, OneMachine):  # its store has a port of its own; torch 2.11 would name 29500
            spec.master_addr = spec.master_port = None
        self._asked = 0  # the stop signal received; 0 for none
        self._starting = False
        os.environ[LAUNCHER] = str(os.getpid())
        set_signal_handlers(STOP_SIGNALS, self._forward)
        set_signal_handlers((GIVEN_UP,), self._hear_of_rank)

    def run(self, *arguments: Any) -> RunResult:
        try:
            result: RunResult = super().run(*arguments)
            return result
        finally:
            ignore_stop_signals()  # after this only the exit statuses of the processes count

    def _forward(self, number: int, frame: FrameType | None = None) -> None:
        again, self._asked = number == signal.SIGINT == self._asked, number
        if again and self._worker_group.state == WorkerState.HEALTHY:
            raise SignalException("Ctrl-C", signal.SIGINT)  # torchrun ends the processes, whatever they do
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        state = self._worker_group.state
        if state == WorkerState.HEALTHY:
            self._remaining_restarts = 0
            for process in self._processes():
                process.send_signal(number)  # does nothing for a process that has exited
        elif state in (WorkerState.INIT, WorkerState.STOPPED) and not self._starting:
            exit_before_start(number)  # there are no processes
        # Otherwise they are starting, and get the signal afterwards; or they have exited, and are not restarted.

    def _hear_of_rank(self, number: int, frame: FrameType | None = None) -> None:
        """A rank got a stop signal. Ignored if it came from torchrun, which ends all ranks when one has failed."""
        if all(process.poll() in (None, 0, *(-stop for stop in STOP_SIGNALS)) for process in self._processes()):
            self._asked = self._asked or signal.SIGTERM
            self._pass_on(signal.SIGTERM)

    def _processes(self) -> list[Popen[bytes]]:
        context = cast(SubprocessContext | None, self._pcontext)
        return [handler.proc for handler in context.subprocess_handlers.values()] if context else []

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self._asked:
            exit_before_start(self._asked)
        super()._initialize_workers(worker_group)
        self._starting = False
        if self._asked:
            self._pass_on(self._asked)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starting = True
        # The processes inherit this. A KeyboardInterrupt during Python's startup would print a traceback: train.py
        # unblocks Ctrl-C once it can. Another thread of this process may still take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            workers: dict[int, Any] = super()._start_workers(worker_group)
            return workers
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _invoke_run(self, *arguments: Any) -> RunResult:
        try:
            return super()._invoke_run(*arguments)
        except RendezvousError:  # the launcher that hosts the store has exited
            self._await_last_words()
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            rank, failure = root_cause(result.failures)
            # Restarting does not fix a user error, and a run that was asked to stop should not restart.
            if failure.exitcode in (EXIT_STATUS, *(128 + number for number in STOP_SIGNALS)):
                self._remaining_restarts = 0
            message = _message(rank, failure.exitcode, self._remaining_restarts)
            if message and not (self._asked and -failure.exitcode in STOP_SIGNALS):
                print(message, file=sys.stderr)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        os.environ[STARTED_AGAIN] = "yes"
        if worker_group.state == WorkerState.HEALTHY:
            print("Another machine is restarting its processes; restarting this machine's too.", file=sys.stderr)
            self._await_last_words()
        super()._restart_workers(worker_group)

    def _await_last_words(self) -> None:
        """A process on another machine has failed. Ours are about to notice, and report it."""
        if self._pcontext is not None:
            self._pcontext.wait(LAST_WORDS)


def root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that was killed (it could not report that itself, and made the others fail); else one with a user error;
    else the first to fail. Ranks ended by SIGTERM or killed later were ended by torchrun."""
    first = min(failure.timestamp for failure in failures.values())  # whole seconds

    def later(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        killed = failure.exitcode < 0 and -failure.exitcode not in STOP_SIGNALS and failure.timestamp <= first + 1
        return not killed, failure.exitcode != EXIT_STATUS, failure.timestamp

    return min(failures.items(), key=later)


def _message(rank: int, exitcode: int, restarts: int) -> str:
    """'' if the process has reported its error itself and there is no restart."""
    if exitcode >= 0 and not restarts:
        return ""
    end = f"exited with status {exitcode}" if exitcode >= 0 else f"was killed by {signal.Signals(-exitcode).name}"
    hint = " (often: out of memory)" if -exitcode == signal.SIGKILL else ""
    again = f" Restarting all processes; restarts left after this one: {restarts - 1}." if restarts else ""
    return f"Error: the process of rank {rank} {end}{hint}.{again}"
