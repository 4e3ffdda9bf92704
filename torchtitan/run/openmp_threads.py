"""Keeps the threads of a CPU run from spinning while other processes need the cores."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable

import torch

from torchtitan.container import affinity_cores
from torchtitan.device import BUSY, THREADS, CoreMeter
from torchtitan.launcher.monitor import Watcher, in_background
from torchtitan.logging import logger

LOOK_INTERVAL = 0.5  # seconds
QUIET = 0.05  # threads that wait for a core, on average


def limit_spinning(on_busy: Callable[[float], None] = lambda waiting: None) -> Watcher:
    """Watches a CPU run. Calls `on_busy` when the machine becomes busy, with the number of threads that lack a core.

    A waiting libgomp thread spins 300,000 times (16 ms on an Intel CPU) before it sleeps. That is fastest on an idle
    machine. But if another process has the core of the thread that all wait for, spinning keeps that thread off the
    other cores, and a run with 2 threads loses 90% of its speed or more. libgomp spins only 100 times while there are
    more OpenMP threads than cores, counting idle ones (GCC's manual, GOMP_SPINCOUNT); so we keep idle threads while the
    machine is busy.
    """
    decided = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))  # set by the user
    if decided or not _libgomps() or torch.get_num_threads() == 1 or not THREADS.exists():
        return
    quiet: threading.Event | None = None  # set it to end the idle threads
    message = (
        "busy: other processes keep {:.1f} threads of this run waiting for a core, on average. Stop them, or expect "
        "half the speed at best; meanwhile waiting threads sleep instead of spinning."
    )
    meter, last = CoreMeter(), 0.0
    try:
        while True:
            yield LOOK_INTERVAL
            lacking = meter.threads_waiting()
            if quiet is None and min(lacking, last) > BUSY:  # for two intervals in a row
                quiet = threading.Event()
                threading.Thread(target=_keep_idle_threads, args=(quiet,), daemon=True).start()
                yield from in_background(functools.partial(on_busy, lacking))
                if message:
                    yield from in_background(functools.partial(logger.info, message.format(lacking)))
                    message = ""  # once a run
            elif quiet is not None and lacking < QUIET:
                quiet.set()
                quiet = None
            last = lacking
    finally:
        if quiet is not None:
            quiet.set()


def _keep_idle_threads(quiet: threading.Event) -> None:
    """Starts an idle team of this thread's own, which libgomp ends with the thread."""
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL)
    count = max(2, affinity_cores() - torch.get_num_threads() + 2)
    for libgomp in _libgomps():
        libgomp.GOMP_parallel(nothing, None, ctypes.c_uint(count), ctypes.c_uint(0))
    quiet.wait()


def _libgomps() -> list[ctypes.CDLL]:
    """libgomp in this process: torch's, and the compiler's if it has another name. Empty for another OpenMP."""
    try:
        with open("/proc/self/maps") as lines:
            return [ctypes.CDLL(path) for path in sorted({line.split()[-1] for line in lines if "/libgomp" in line})]
    except OSError:
        return []
