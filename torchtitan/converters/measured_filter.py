"""`auto_filter_measured`: whether a layer of this size is faster in low precision on this device."""

import functools
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch

from torchtitan.cache import cache_result, cached_results, keep_compiled_code_private
from torchtitan.compat.dynamo import recompile_limit
from torchtitan.converters.numerics import LayerConverter, layer_with, of_rank_0
from torchtitan.device import BUSY, CoreMeter
from torchtitan.logging import logger

Forward = Callable[..., torch.Tensor]

MEASURED_GEMMS = "measured_gemms.json"
ROUNDS = 7
FEW_ROWS, SOME_ROWS = 32, 1024
HEAD_START = 10_000_000  # cycles of the device, about 5 ms: enough for the host to launch 20 passes
HOPELESS = 50  # times slower with a few rows, where rounding alone may cost ten times the GEMM


def measured_reason(converter: LayerConverter, m: int, k: int, n: int, experts: int = 0) -> str | None:
    """Why a layer of this size stays in high precision; None if low precision is faster.

    Results are cached across runs, by device and versions. Without the device, as in a plan, only what is cached is
    known; the rest counts as faster.
    """
    dtype = converter.target.dtype
    ratio = of_rank_0(converter.target, lambda: _cached_speedup(converter, m, k, n, experts))
    of_experts, m_k_n = f", {experts} experts" if experts else "", f"M = {m}, K = {k}, N = {n}"
    return None if ratio > 1 else f"{ratio:.2f} x the speed of {name_of(dtype)} at {m_k_n}{of_experts}"


def name_of(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")


def _cached_speedup(converter: LayerConverter, m: int, k: int, n: int, experts: int) -> float:
    target = converter.target
    key = " | ".join(
        [
            target.device_name or target.device_type,
            f"{torch.get_num_threads()} threads",
            f"torch {torch.__version__}",
            # Experts in mx have torchao's kernels on a GPU.
            *([f"torchao {version('torchao')}"] if converter.name == "mx" and experts else []),
            "compiled" if target.compile else "eager",
            *([] if target.dtype == torch.bfloat16 else [name_of(target.dtype)]),
            converter.description,
            f"{m} {k} {n}" + (f" {experts} experts" if experts else ""),
        ]
    )
    known: float | None = cached_results(MEASURED_GEMMS).get(key)
    if known is None and target.device_type == "meta":
        where = target.device_name or "the device of a run"
        logger.info(f"{converter.description} at ({m}, {k}, {n}) has not been measured on {where}; it counts as faster")
        return math.inf
    if known is None:
        known, busy = speedup(converter, m, k, n, experts)
        logger.info(
            f"measured: {converter.description} at ({m}, {k}, {n}) is {known:.2f} x the speed of "
            f"{name_of(target.dtype)}"
            + (", for this run only: the machine was busy, so the next run measures again" if busy else "")
        )
        cache_result(MEASURED_GEMMS, key, known, keep=not busy)
    return known


def speedup(converter: LayerConverter, m: int, k: int, n: int, experts: int = 0) -> tuple[float, bool]:
    """High-precision time divided by low-precision time, forward and backward of one layer, from the fastest of several
    interleaved rounds; and whether other processes used the CPU meanwhile."""
    target, meter = converter.target, CoreMeter()
    high, low = _fastest(converter, m, k, n, dtype=target.dtype, experts=experts, compiled=target.compile, meter=meter)
    return high / low, meter.threads_waiting() > BUSY


def _fastest(converter: LayerConverter, m: int, k: int, n: int, **options: Any) -> list[float]:
    """Seconds of an unconverted and a converted layer, forward and backward."""
    return [min(map(sum, times)) for times in layer_seconds([None, converter], m, k, n, **options)]


def slowness(converter: LayerConverter, dtype: torch.dtype) -> list[float]:
    """Time of a converted layer divided by its time in `dtype`, for each distinct layer size, on a CPU. Tries a few
    rows first: without a real kernel, a GEMM takes a thousand times as long."""
    sizes = {(layer.k, layer.n, layer.experts): layer.m for layer in converter.decisions if layer.converted}
    ratios = []
    for (k, n, experts), m in sizes.items():
        for rows in (FEW_ROWS, min(m, SOME_ROWS)):
            high, low = _fastest(converter, rows, k, n, rounds=3, dtype=dtype, experts=experts)
            if rows == FEW_ROWS and low > HOPELESS * high:
                break
        ratios.append(low / high)
    return ratios


LAUNCHES = 10
MOST_SIZES = 256  # that a process measures, at most; the compiler's own limit would be 8


def _device_seconds(forward: Forward, inputs: Sequence[torch.Tensor], out_grad: torch.Tensor) -> tuple[float, float]:
    """(forward, backward) seconds of the device's own clock, for one of several launches in a row: a single launch of
    a small layer would measure the host."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    # Keeps the device busy while the host queues what is measured.
    torch.cuda._sleep(HEAD_START)
    start.record()
    outs = [forward(*inputs) for _ in range(LAUNCHES)]
    middle.record()
    for out in outs:
        out.backward(out_grad)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(middle) / 1e3 / LAUNCHES, middle.elapsed_time(end) / 1e3 / LAUNCHES


def layer_seconds(
    converters: Sequence[LayerConverter | None],
    m: int,
    k: int,
    n: int,
    rounds: int = ROUNDS,
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False,
    experts: int = 0,
    meter: CoreMeter | None = None,
) -> list[list[tuple[float, float]]]:
    """(forward, backward) seconds of one layer in `dtype`, for each converter (None: unconverted) and round.

    Rounds are interleaved, since a machine's speed drifts. The layer has no bias; (m, k) x (k, n).

    Args:
        experts: of a layer of experts with m rows each; 0 for an ordinary layer.
        meter: is started after the warm-up.
    """
    target = next(converter.target for converter in converters if converter is not None)
    device = "cuda" if target.device_type == "cuda" else "cpu"
    rows = m * max(experts, 1)
    inputs = [torch.randn(rows, k, device=device, dtype=dtype, requires_grad=True)]
    if experts:
        inputs.append(torch.arange(m, rows + 1, m, device=device, dtype=torch.int32))
    out_grad = torch.randn(rows, n, device=device, dtype=dtype)
    weights = torch.randn(*([experts] if experts else []), n, k, device=device, dtype=dtype) * k**-0.5
    layers = [layer_with(weights.clone()) for _ in converters]
    modules = [
        layer if converter is None else converter.low_precision(layer)
        for converter, layer in zip(converters, layers, strict=True)
    ]
    keep_compiled_code_private()
    # Training compiles, too; here for these sizes alone.
    forwards: list[Forward] = [
        torch.compile(module, fullgraph=True, dynamic=False) if compiled else module for module in modules
    ]

    def seconds(forward: Forward) -> tuple[float, float]:
        start = perf_counter()
        out = forward(*inputs)
        middle = perf_counter()
        out.backward(out_grad)
        return middle - start, perf_counter() - middle

    with recompile_limit(MOST_SIZES):
        for forward in forwards:  # warm up: compile, load kernels, fill caches
            seconds(forward)
            seconds(forward)
    if device == "cuda":
        seconds = functools.partial(_device_seconds, inputs=inputs, out_grad=out_grad)
    if meter is not None:
        meter.threads_waiting()
    of_rounds = [[seconds(forward) for forward in forwards] for _ in range(rounds)]
    return [list(times) for times in zip(*of_rounds, strict=True)]
