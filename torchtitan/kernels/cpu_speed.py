"""Which number formats this CPU multiplies fast, found out by small GEMMs."""

import functools
from collections.abc import Callable
from time import perf_counter

import torch

SIZE = 256  # a float32 GEMM of this size takes 0.1 to 1 ms
REPETITIONS = 5
HOPELESS = 4  # so many times slower than float32 once: no second try


@functools.cache
def bfloat16_is_fast() -> bool:
    """Whether a bfloat16 GEMM takes less time than a float32 one. Without instructions for it, it takes 10 to 100 times
    as long."""
    matrix = torch.ones(SIZE, SIZE)
    low = matrix.bfloat16()
    return _is_faster(lambda: low @ low, than=lambda: matrix @ matrix)


@functools.cache
def int8_is_fast() -> bool:
    """The same of int8, where its sums are exact. Without VNNI, oneDNN's int8 GEMM adds pairs of products in 16 bits,
    in which large ones saturate."""
    matrix = large_int8_numbers(SIZE, SIZE)
    low = matrix.to(torch.int8)
    if not torch.equal(torch._int_mm(low, low).float(), matrix @ matrix):
        return False
    return _is_faster(lambda: torch._int_mm(low, low), than=lambda: matrix @ matrix)


def large_int8_numbers(*shape: int) -> torch.Tensor:
    """Float32, of both signs; float32 holds the sums of up to a thousand of their products exactly."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 128, shape, generator=generator).float() * (
        2.0 * torch.randint(2, shape, generator=generator) - 1
    )


def fast_dtype() -> torch.dtype:
    """In which to multiply numbers that both bfloat16 and float32 hold exactly."""
    return torch.bfloat16 if bfloat16_is_fast() else torch.float32


def _is_faster(operation: Callable[[], object], than: Callable[[], object]) -> bool:
    """By the shortest of several runs, in turn: others may use the CPU at the same time."""
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
