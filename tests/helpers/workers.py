"""Runs functions in several processes of one gloo group, each forked from a process that has imported torch."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from benchmarks import forks

R = TypeVar("R")

PATIENCE = 280  # seconds; allows for busy machines
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preload"])


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[], R]) -> R:
    """`make()`, called by one of pytest's workers for all of them, which share the cases of a module."""
    folder = tmp_path_factory.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"{name}.pt"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            torch.save(make(), file)
        result: R = torch.load(file, weights_only=False)
    return result


def in_processes(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Runs `function(*arguments)` on every rank. Returns the results. A failing rank fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(world_size, _in_group, function, world_size, folder, arguments)
        return [torch.load(Path(folder) / f"result{rank}") for rank in range(world_size)]


def _in_group(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = function(*arguments)
    torch.save(result, f"{folder}/result{rank}")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Runs `function(rank, *arguments)` in `world_size` processes, with this process's environment."""
    waiting: dict[Any, tuple[int, Any]] = {}  # pipe -> rank and process
    for rank in range(world_size):
        parent_end, child_end = _context.Pipe()
        target = (child_end, dict(os.environ), function, (rank, *arguments))
        process = _context.Process(target=_call, args=target, daemon=True)
        process.start()
        child_end.close()
        waiting[parent_end] = rank, process
    processes = [process for _, process in waiting.values()]
    failures, deadline = "", time.monotonic() + PATIENCE
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in cast(list[Connection], wait(list(waiting), left)):
            rank, process = waiting.pop(connection)
            try:
                failure = connection.recv()
            except EOFError:
                failure = "the process has died"
            if failure:
                failures += f"rank {rank}: {failure}\n"
                deadline = min(deadline, time.monotonic() + 3)  # the others may wait for it forever
    for process in processes:
        if failures or waiting:
            process.kill()
        process.join()
    if failures or waiting:
        late = sorted(rank for rank, _ in waiting.values())
        raise AssertionError(failures or f"ranks {late} are not done after {PATIENCE} s")


def exit_status_of(function: Callable[..., None], *arguments: Any) -> int:
    """Runs `function(*arguments)` in a process, with this process's environment. Returns its exit status."""
    process = _context.Process(target=_call_program, args=(dict(os.environ), function, arguments), daemon=True)
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"not done after {PATIENCE} s")
    return process.exitcode if process.exitcode >= 0 else 128 - process.exitcode


class Forked:
    """The part of `subprocess.Popen` that `runs.Run` uses, for `python SCRIPT ...` and `python -m MODULE ...`: a fork
    that is set up as a fresh interpreter after its imports, and the ranks that it launches are, too."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, screen: str) -> None:
        # Not a daemon, which could not start workers.
        self._process = _context.Process(target=_become_program, args=(list(command), environment, str(folder), screen))
        self._process.start()
        self.pid = self._process.pid or 0
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # as if it had been started in its own session
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return status


def _become_program(command: list[str], environment: dict[str, str], folder: str, screen: str) -> None:
    atexit._clear()  # what was registered before the fork
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(screen, os.O_WRONLY)
    forks.become(command[1:], environment, file, file, folder)


def _call_program(variables: dict[str, str], function: Callable[..., None], arguments: Any) -> None:
    _prepare(variables)
    function(*arguments)


def _prepare(variables: dict[str, str]) -> None:
    atexit._clear()  # what was registered before the fork
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)


def _call(answer: Connection, variables: dict[str, str], function: Callable[..., None], arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which terminates the ranks
    _prepare(variables)
    try:
        function(*arguments)
    except BaseException:
        answer.send(traceback.format_exc())
    else:
        answer.send("")
