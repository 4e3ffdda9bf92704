"""How long this rank waits in collectives: for other ranks, and for what they send."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.compat.distributed import FSDPParamGroup, functional_collectives
from torchtitan.compat.dynamo import is_compiling

WAITS: dict[str, tuple[tuple[Any, str], ...]] = {  # functions that wait, by type of device
    "cpu": ((dist.Work, "wait"), (functional_collectives, "wait_tensor")),
    "cuda": ((FSDPParamGroup, "wait_for_unshard"), (FSDPParamGroup, "finalize_backward")),
}


@contextlib.contextmanager
def collective_waits(device_type: str) -> Iterator[Callable[[], float]]:
    """Yields a function: the seconds for which this rank has waited since then.

    On CPU it is the time in which the main thread waits for collectives. On CUDA the host does not wait: it is the time
    in which the compute stream waits for FSDP's all-gathers, and after the backward pass for its reductions, as far as
    the device has come; other collectives count as the rank's own work, and so do compiled ones on both.
    """
    clock = _DeviceClock() if device_type == "cuda" else _HostClock()
    with contextlib.ExitStack() as stack:
        for owner, name in WAITS.get(device_type, ()):
            wait = getattr(owner, name)
            setattr(owner, name, clock.timed(wait))
            stack.callback(setattr, owner, name, wait)
        yield clock.seconds


class _HostClock:
    def __init__(self) -> None:
        self.total = 0.0
        self.thread = threading.get_ident()  # others wait for checkpoints in the background

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*arguments: Any, **options: Any) -> Any:
            if is_compiling() or threading.get_ident() != self.thread:
                return wait(*arguments, **options)
            start = perf_counter()
            try:
                return wait(*arguments, **options)
            finally:
                self.total += perf_counter() - start

        return timed

    def seconds(self) -> float:
        return self.total


class _DeviceClock:
    def __init__(self) -> None:
        self.total = 0.0
        self.running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*arguments: Any, **options: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = wait(*arguments, **options)
            end.record()
            self.running.append((start, end))
            self.seconds()  # so that few events are kept
            return result

        return timed

    def seconds(self) -> float:
        while self.running and self.running[0][1].query():
            start, end = self.running.popleft()
            self.total += start.elapsed_time(end) / 1000
        return self.total
