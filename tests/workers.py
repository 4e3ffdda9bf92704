"""Functions in several processes of one gloo group. The processes stay for the next one: they take seconds to start."""

import gc
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 240  # seconds; for machines that do much else
_ranks: list[tuple[Any, Connection]] = []
"""Process and pipe of each that has been started: rank 0, rank 1, ..."""


def in_processes(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every rank; what each of them returned. A rank that fails fails the test."""
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
    """`function(rank, *arguments)` in so many processes. After a failure, none of them is used again."""
    while len(_ranks) < world_size:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        _ranks.append((process, here))
    waiting = {connection: rank for rank, (_, connection) in enumerate(_ranks[:world_size])}
    for connection, rank in waiting.items():
        connection.send((sys.path, function, (rank, *arguments)))
    failures, deadline = "", time.monotonic() + PATIENCE
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                failure = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                failure = "the process has died"
            if failure:
                failures += f"rank {rank}: {failure}\n"
                deadline = min(deadline, time.monotonic() + 3)  # the others may wait for it for ever
    if failures or waiting:
        for process, _ in _ranks:
            process.kill()
        _ranks.clear()
        raise AssertionError(failures or f"ranks {sorted(waiting.values())} are not done after {PATIENCE} s")


def _serve(requests: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends the ranks
    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:], function, arguments = requests.recv()
        except EOFError:  # the tests are over
            return
        try:
            function(*arguments)
        except BaseException:
            requests.send(traceback.format_exc())
            return
        torch.compiler.reset()  # compiled code depends on no earlier test
        gc.collect()
        requests.send("")
