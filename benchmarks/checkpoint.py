#!/usr/bin/env python3
"""How long a checkpoint blocks training, and how long it takes in total, compared with the disk's own speed.

python -m benchmarks checkpoint [--gigabytes 1] [--folder FOLDER] [--repeats 3]

Saves a model of one process, of the given size including AdamW state, with each `async_mode`, as a run would. The raw
speed is measured by writing as many bytes with `write` and `fsync`. The best of several saves counts; the first save of
each mode, which also allocates memory, is not measured. On a GPU the mode with pinned memory is measured too.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.manifest import damage
from torchtitan.checkpoint.train_state import TrainState
from torchtitan.config.output import Checkpoint
from torchtitan.device import find_device

WIDTH = 4096
COPIES = 3  # of each weight: the weight and its two moments
BLOCK = 16 << 20  # bytes per raw write


def build(gigabytes: float, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = max(1, round(gigabytes * 1e9 / (WIDTH * WIDTH * 4 * COPIES)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def raw_write(path: Path, size: int) -> float:
    """Seconds to write and sync this many incompressible bytes."""
    block = os.urandom(BLOCK)
    start = perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    seconds = perf_counter() - start
    path.unlink()
    return seconds


def saves(mode: str, folder: Path, gigabytes: float, repeats: int, synchronize: Callable[[], None]) -> None:
    """Measures one mode and prints its line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = build(gigabytes, device)
    config = Checkpoint(enable_checkpoint=True, async_mode=mode, keep_latest_k=2)  # type: ignore[arg-type]
    manager = CheckpointManager(config, folder, model, optimizer, identity={})
    stalls, totals, verifying, raw = [], [], [], []
    for step in range(1, repeats + 2):
        synchronize()
        start = perf_counter()
        manager.save(step, partial(TrainState, step=step))
        stalls.append(perf_counter() - start)
        manager.wait()
        totals.append(perf_counter() - start)
        saved = manager.folder / f"step-{step}"
        size = sum(path.stat().st_size for path in saved.iterdir())
        start = perf_counter()
        if manager.failed_saves or damage(saved):
            raise SystemExit("a save failed")
        verifying.append(perf_counter() - start)
        raw.append(raw_write(folder / "raw", size))
    stall, total, verify, disk = (min(times[1:]) / size * 1e9 for times in (stalls, totals, verifying, raw))
    print(
        f"| `{mode}` | {size / 1e9:.2f} GB | {stall:.2f} s | {total:.2f} s | {disk:.2f} s | {disk / total:.0%} "
        f"| {verify:.2f} s |",
        flush=True,
    )
    shutil.rmtree(manager.folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gigabytes", type=float, default=1, help="size of a checkpoint")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device = find_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    modes = ["disabled", "async"] + ["async_with_pinned_mem"] * (device.type == "cuda")
    print(
        "| mode | checkpoint | loop blocked, per GB | whole save, per GB | raw write, per GB | fraction of raw speed "
        "| check |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for mode in modes:
            saves(mode, Path(folder), arguments.gigabytes, arguments.repeats, device.synchronize)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
