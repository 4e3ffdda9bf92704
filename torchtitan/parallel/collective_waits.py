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
    on_device = device_type == "cuda"
    thread = threading.get_ident()  # on CPU, others wait for checkpoints in the background
    running: deque[tuple[Any, Any]] = deque()  # start and end of waits not yet counted
    total = 0.0

    def now() -> Any:
        if not on_device:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*arguments: Any, **options: Any) -> Any:
            if not on_device and (is_compiling() or threading.get_ident() != thread):
                return wait(*arguments, **options)
            start = now()
            result = wait(*arguments, **options)
            running.append((start, now()))
            seconds()  # so that few events are kept
            return result

        return timed

    def seconds() -> float:
        nonlocal total
        while running and (not on_device or running[0][1].query()):
            start, end = running.popleft()
            total += start.elapsed_time(end) / 1000 if on_device else end - start
        return total

    with contextlib.ExitStack() as stack:
        for owner, name in WAITS.get(device_type, ()):
            wait = getattr(owner, name)
            setattr(owner, name, timed(wait))
            stack.callback(setattr, owner, name, wait)
        yield seconds
