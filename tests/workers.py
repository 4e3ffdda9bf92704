"""Functions in several processes of one gloo group."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_processes(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every rank; what each of them returned. A rank that fails fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (function, world_size, folder, arguments), nprocs=world_size)
        return [torch.load(Path(folder) / f"result{rank}") for rank in range(world_size)]


def _work(rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = function(*arguments)
    torch.save(result, f"{folder}/result{rank}")
    dist.barrier()
    dist.destroy_process_group()
