"""Runs train.py and other commands in forks of this process, which has already imported their modules, so that they
start immediately.

A fork is set up like a fresh interpreter after its imports: default signal handlers, no inherited files, its own
variables and arguments.
"""

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

PR_SET_NAME = 15


class ForkedProcess:
    """The part of `subprocess.Popen` that torchrun uses, for `python SCRIPT ...` and `python -m MODULE ...`."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        cwd: str | None = None,
        start_new_session: bool = True,
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            become([*args][1:], env, stdout, stderr, cwd)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # a signal handler polls too
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become(
    arguments: list[str], env: Mapping[str, str], stdout: int | None, stderr: int | None, cwd: str | None
) -> NoReturn:
    """Makes this process, a fork, the program with these arguments: a script, or `-m` and a module.

    Args:
        stdout, stderr: descriptors; None for those that it has.
    """
    status = 1
    try:
        os.setsid()
        tempfile.tempdir = None
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # else deletes the parent's folders
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for target, source in ((1, stdout), (2, stderr)):
            if source is not None:
                os.dup2(source, target)
        os.closerange(3, 4096)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        if "RANK" in env:
            ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank{env['RANK']}".encode())
        status = _run(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # as at interpreter exit
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _run(arguments: list[str]) -> int:
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[:2] == ["-m", "torchtitan.launch"]:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        from torchtitan.launch import launch

        handler: Any = subprocess_handler
        handler.Popen = ForkedProcess
        return launch(arguments[2:])
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def import_ahead() -> None:
    """Imports a run's modules before the first fork. Creates no tensors, because threads do not survive a fork."""
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.launcher.api
    import torch.distributed.run  # noqa: F401
