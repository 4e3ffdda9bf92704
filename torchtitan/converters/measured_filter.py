"""`auto_filter_measured`: whether a layer of this size is faster in low precision on this device."""

import functools
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.cache import cache_result, cached_results, keep_compiled_code_private
from torchtitan.logging import logger

if TYPE_CHECKING:
    from torchtitan.converters.linear import LinearConverter

Forward = Callable[[torch.Tensor], torch.Tensor]

RESULTS = "measured_products.json"
ROUNDS = 7
FEW_ROWS, SOME_ROWS = 32, 1024
HEAD_START = 10_000_000  # cycles of the device, about 5 ms: enough for the host to launch 20 passes
HOPELESS = 50  # times slower with a few rows, where rounding alone may cost ten times the GEMM


def measured_reason(converter: "LinearConverter", m: int, k: int, n: int) -> str | None:
    """Why a layer of this size stays in bf16; None if low precision is faster.

    One rank measures and broadcasts, so that all convert the same layers. Results are cached across runs, by device and
    versions.
    """
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    ratio = [0.0]
    if not distributed or dist.get_rank() == 0:
        ratio[0] = _cached_speedup(converter, m, k, n)
    if distributed:
        dist.broadcast_object_list(ratio)
    return None if ratio[0] > 1 else f"{ratio[0]:.2f} x the speed of bf16 at M = {m}, K = {k}, N = {n}"


def _cached_speedup(converter: "LinearConverter", m: int, k: int, n: int) -> float:
    target = converter.target
    key = " | ".join(
        [
            target.device_name or target.device_type,
            f"{torch.get_num_threads()} threads",
            f"torch {torch.__version__}",
            *([f"torchao {version('torchao')}"] if converter.name == "mx" else []),  # the layer is torchao's
            "compiled" if target.compile else "eager",
            converter.description,
            f"{m} {k} {n}",
        ]
    )
    known: float | None = cached_results(RESULTS).get(key)
    if known is None:
        known = speedup(converter, m, k, n)
        logger.info(f"measured: {converter.description} at ({m}, {k}, {n}) is {known:.2f} x the speed of bf16")
        cache_result(RESULTS, key, known)
    return known


def speedup(converter: "LinearConverter", m: int, k: int, n: int) -> float:
    """bf16 time divided by low-precision time, forward and backward of one layer; medians of interleaved rounds."""
    seconds = layer_seconds([None, converter], m, k, n, compiled=converter.target.compile)
    high_seconds, low_seconds = (statistics.median(map(sum, times)) for times in seconds)
    return high_seconds / low_seconds


def slowness(converter: "LinearConverter", dtype: torch.dtype) -> list[float]:
    """Time of a converted layer divided by its time in `dtype`, for each distinct layer size, on a CPU.

    Tries a few rows first: without a real kernel, a GEMM takes a thousand times as long.
    """
    sizes = {(decision.k, decision.n): decision.m for decision in converter.decisions if decision.converted}
    ratios = []
    for (k, n), m in sizes.items():
        for rows in (FEW_ROWS, min(m, SOME_ROWS)):
            high, low = (
                min(map(sum, times)) for times in layer_seconds([None, converter], rows, k, n, rounds=2, dtype=dtype)
            )
            if rows == FEW_ROWS and low > HOPELESS * high:
                break
        ratios.append(low / high)
    return ratios


LAUNCHES = 10


def _device_seconds(forward: Forward, x: torch.Tensor, out_grad: torch.Tensor) -> tuple[float, float]:
    """(forward, backward) seconds of the device's own clock, for one of several launches in a row: a single launch of
    a small layer would measure the host."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    # Keeps the device busy while the host queues what is measured.
    torch.cuda._sleep(HEAD_START)
    start.record()
    outs = [forward(x) for _ in range(LAUNCHES)]
    middle.record()
    for out in outs:
        out.backward(out_grad)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(middle) / 1e3 / LAUNCHES, middle.elapsed_time(end) / 1e3 / LAUNCHES


def layer_seconds(
    converters: "Sequence[LinearConverter | None]",
    m: int,
    k: int,
    n: int,
    rounds: int = ROUNDS,
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False,
) -> list[list[tuple[float, float]]]:
    """(forward, backward) seconds of one layer in `dtype`, for each converter (None: unconverted) and round.

    Rounds are interleaved, since a machine's speed drifts. The layer has no bias; (m, k) x (k, n).
    """
    target = next(converter.target for converter in converters if converter is not None)
    device = "cuda" if target.device_type == "cuda" else "cpu"
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    out_grad = torch.randn(m, n, device=device, dtype=dtype)
    layers = [nn.Linear(k, n, bias=False, device=device, dtype=dtype) for _ in converters]
    modules = [c.swap(layer) if c is not None else layer for c, layer in zip(converters, layers, strict=True)]
    keep_compiled_code_private()
    forwards: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.compile(module) if compiled else module for module in modules
    ]

    def seconds(forward: Forward) -> tuple[float, float]:
        start = perf_counter()
        out = forward(x)
        middle = perf_counter()
        out.backward(out_grad)
        return middle - start, perf_counter() - middle

    for forward in forwards:  # warm up: compile, load kernels, fill caches
        seconds(forward)
        seconds(forward)
    if device == "cuda":
        seconds = functools.partial(_device_seconds, x=x, out_grad=out_grad)
    rows = [[seconds(forward) for forward in forwards] for _ in range(rounds)]
    return [list(column) for column in zip(*rows, strict=True)]
