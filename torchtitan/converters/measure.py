"""`auto_filter_measured`: is a layer of this size faster in low precision, on this device?"""

import json
import os
import statistics
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.logging import logger

if TYPE_CHECKING:
    from torchtitan.converters.linear import LinearConverter

ROUNDS = 7


def measured_reason(converter: "LinearConverter", m: int, k: int, n: int) -> str | None:
    """Why a layer of this size stays in bf16, or None where low precision wins.

    One rank measures and all follow it, so that they convert the same layers. Results are kept from run to run, by
    device and versions.
    """
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    ratio = [0.0]
    if not distributed or dist.get_rank() == 0:
        ratio[0] = _cached_speedup(converter, m, k, n)
    if distributed:
        dist.broadcast_object_list(ratio)
    return None if ratio[0] > 1 else f"{ratio[0]:.2f} x the speed of bf16 at M = {m}, K = {k}, N = {n}"


def cache_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "torchtitan" / "measured_products.json"


def _cached_speedup(converter: "LinearConverter", m: int, k: int, n: int) -> float:
    target = converter.target
    key = " | ".join(
        [
            target.device_name or target.device_type,
            f"{torch.get_num_threads()} threads",
            f"torch {torch.__version__}",
            f"torchao {version('torchao')}",
            "compiled" if target.compile else "eager",
            converter.description,
            f"{m} {k} {n}",
        ]
    )
    file = cache_file()
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        known[key] = speedup(converter, m, k, n)
        logger.info(f"measured: {converter.description} at ({m}, {k}, {n}) is {known[key]:.2f} x the speed of bf16")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(known, indent=1))
            temporary.replace(file)
        except OSError:
            pass  # measured again next time
    return known[key]


def speedup(converter: "LinearConverter", m: int, k: int, n: int) -> float:
    """Time of bf16 over time of low precision, forward and backward of one layer; medians of interleaved rounds."""
    device = "cuda" if converter.target.device_type == "cuda" else "cpu"
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    out_grad = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    high = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    low = converter.swap(nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16))
    forwards: list[Any] = [torch.compile(module) if converter.target.compile else module for module in (high, low)]

    def seconds(forward: Any) -> float:
        start = perf_counter()
        forward(x).backward(out_grad)
        if device == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - start

    for forward in forwards:  # compile, load kernels, fill caches
        seconds(forward)
        seconds(forward)
    rounds = [[seconds(forward) for forward in forwards] for _ in range(ROUNDS)]
    high_seconds, low_seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
    return high_seconds / low_seconds
