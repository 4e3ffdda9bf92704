"""Which dtypes this CPU multiplies fast, measured with small GEMMs."""

import functools
import math
from collections.abc import Callable
from time import perf_counter

import torch

SIZE = 256  # a float32 GEMM of this size takes 0.1 to 1 ms
REPETITIONS = 15  # the fastest counts: on a busy machine most are interrupted
HOPELESS = 4  # times slower than float32 ...
ENOUGH = 5  # ... after so many repetitions: give up, since each takes up to 30 ms


@functools.cache
def bfloat16_is_fast() -> bool:
    """Whether a bfloat16 GEMM is faster than a float32 one. Without bfloat16 instructions it is 10 to 100 times
    slower."""
    matrix = torch.ones(SIZE, SIZE)
    low = matrix.bfloat16()
    return _is_faster(lambda: low @ low, than=lambda: matrix @ matrix)


@functools.cache
def int8_is_fast() -> bool:
    """Whether an int8 GEMM is faster than a float32 one and exact. Without VNNI, oneDNN's int8 GEMM adds pairs of
    products in 16 bits, where large ones saturate."""
    matrix = large_int8_numbers(SIZE, SIZE)
    low = matrix.to(torch.int8)
    if not torch.equal(torch._int_mm(low, low).float(), matrix @ matrix):
        return False
    return _is_faster(lambda: torch._int_mm(low, low), than=lambda: matrix @ matrix)


def large_int8_numbers(*shape: int) -> torch.Tensor:
    """Large int8 values of both signs, as float32, which sums up to a thousand of their products exactly."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 128, shape, generator=generator).float() * (
        2.0 * torch.randint(2, shape, generator=generator) - 1
    )


def fast_dtype() -> torch.dtype:
    """The dtype to multiply numbers in that both bfloat16 and float32 represent exactly."""
    return torch.bfloat16 if bfloat16_is_fast() else torch.float32


def _is_faster(operation: Callable[[], object], than: Callable[[], object]) -> bool:
    """Compares the minimum of several alternating runs, since other processes may be using the CPU."""
    operation(), than()  # the first call loads kernels and starts threads
    time = other = math.inf
    for repetition in range(REPETITIONS):
        time, other = min(time, _seconds(operation)), min(other, _seconds(than))
        if repetition >= ENOUGH and time > HOPELESS * other:
            return False
    return time < other


def _seconds(operation: Callable[[], object]) -> float:
    start = perf_counter()
    operation()
    return perf_counter() - start
