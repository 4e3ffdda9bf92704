"""Which dtypes this CPU multiplies fast, measured with small GEMMs."""

import functools
from collections.abc import Callable
from time import perf_counter

import torch

SIZE = 256  # a float32 GEMM of this size takes 0.1 to 1 ms
REPETITIONS = 15  # the fastest counts: on a busy machine most are interrupted
HOPELESS = 4  # times slower than float32: give up without further measurements


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
    than()  # the first call loads kernels and starts threads
    reference = min(_seconds(than) for _ in range(REPETITIONS))
    if _seconds(operation) > HOPELESS * reference and _seconds(operation) > HOPELESS * reference:
        return False
    times = [(_seconds(operation), _seconds(than)) for _ in range(REPETITIONS)]
    return min(seconds for seconds, _ in times) < min(reference, *(seconds for _, seconds in times))


def _seconds(operation: Callable[[], object]) -> float:
    start = perf_counter()
    operation()
    return perf_counter() - start
