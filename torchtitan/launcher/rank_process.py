"""The process of one rank: the signals it listens to, and what it prints and exits with when the run fails."""

import contextlib
import errno
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator

from torchtitan.errors import (
    EXIT_STATUS,
    ConfigError,
    DataError,
    LostRankError,
    UserError,
    tell_of_imports,
    without_secrets,
)
from torchtitan.launcher.monitor import watch
from torchtitan.launcher.signals import LAUNCHER, STARTED_AGAIN, Stop, exit_now, ignore_stop_signals, when_gone
from torchtitan.logging import ignore_broken_pipes
from torchtitan.world import number_in, world

RANK, WORLD_SIZE = number_in("RANK", 0), number_in("WORLD_SIZE", 1)
EXIT_PATIENCE = 10  # seconds
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def rank_process(saves: bool = True) -> Iterator[Stop]:
    """Wraps all that this process does: signals ask the yielded `Stop` to end the run, or end it at once unless it
    `saves`; an error ends the process with one sentence and an exit status."""
    ignore_broken_pipes()
    if RANK == 0:
        tell_of_imports()
    try:
        world()
    except ConfigError as error:  # every rank's, or the only process's: there is no rank 0 to report it
        print(f"Error: {error}", file=sys.stderr)
        exit_now(EXIT_STATUS)
    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads, even if none gets to run
    stop = Stop(RANK, saves)
    stop.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Once its launcher is gone, this process would block a new run in the same dump folder.
        watch(when_gone(int(os.environ.get(LAUNCHER, os.getppid())), lambda: exit_now(1)))
    try:
        yield stop
        ignore_stop_signals()
    except Exception as error:
        stop.failed = _status_of(error, stop)
        _report(error, stop)
        exit_now(stop.failed)


def _report(error: Exception, stop: Stop) -> None:
    """Prints what went wrong."""
    prefix = f"[rank {RANK}] " if WORLD_SIZE > 1 else ""
    if isinstance(error, UserError):
        if RANK > 0:  # usually every rank has the same error: let rank 0 report it and end the others
            if stop.requested:
                return
            time.sleep(EXIT_PATIENCE)
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print("\n".join(f"{prefix if RANK else ''}Error: {problem}" for problem in problems), file=sys.stderr)
        return
    # The signal that asked this rank to stop may have ended another rank, or a process of the compiler, already.
    if stop.requested and (isinstance(error, LostRankError) or not stop.has_trained):
        stop.give_up()
    if isinstance(error, LostRankError):
        print(f"{prefix}Error: {error}", file=sys.stderr)
    elif isinstance(error, OSError) and error.errno in DISK_ERRORS:
        print(f"{prefix}Error: {error.filename or 'a file'} cannot be written: {error.strerror}.", file=sys.stderr)
    else:
        lines = without_secrets(traceback.format_exc()).splitlines()
        print("".join(f"{prefix}{line}\n" for line in lines), file=sys.stderr, end="")


def _status_of(error: Exception, stop: Stop) -> int:
    """On 1 torchrun restarts the processes while restarts are left; on EXIT_STATUS it gives up: a restart cannot fix a
    user error. But data or files that were readable earlier in this run may be unavailable only temporarily."""
    if not isinstance(error, UserError) and not (isinstance(error, OSError) and error.errno in DISK_ERRORS):
        return 1
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    started_again = STARTED_AGAIN in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    environmental = any(isinstance(cause, DataError | OSError) for cause in (error, error.__cause__, error.__context__))
    temporary = environmental and not stop.requested and (stop.has_trained or started_again)
    return 1 if restarts and temporary else EXIT_STATUS
