"""Keeps the threads of a CPU run from spinning while other processes need the cores."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import torch

from torchtitan.device import BUSY, TASKS, CoreMeter
from torchtitan.launcher.processes import available_cores
from torchtitan.logging import logger

INTERVAL = 0.5  # seconds
QUIET = 0.05  # threads that wait for a core, on average


@contextlib.contextmanager
def limit_spinning(on_busy: Callable[[float], None] = lambda waiting: None) -> Iterator[None]:
    """Wraps a CPU run. Another thread calls `on_busy` when the machine becomes busy, with the number of threads that
    wait for a core.

    A waiting libgomp thread spins 300,000 times (16 ms on an Intel CPU) before it sleeps. That is fastest on an idle
    machine. But if another process has the core of the thread that all wait for, spinning keeps that thread off the
    other cores, and a run with 2 threads loses 90% of its speed or more. libgomp spins only 100 times while there are
    more OpenMP threads than cores, counting idle ones (GCC's manual, GOMP_SPINCOUNT); so we keep idle threads while the
    machine is busy.
    """
    decided = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))  # set by the user
    if decided or not _libgomps() or torch.get_num_threads() == 1 or not TASKS.exists():
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(ended, on_busy), name="watch for a busy machine", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(ended: threading.Event, on_busy: Callable[[float], None]) -> None:
    quiet: threading.Event | None = None  # set it to end the idle threads
    logged, last = False, 0.0
    meter = CoreMeter()
    while not ended.wait(INTERVAL):
        lacking = meter.threads_waiting()
        if quiet is None and min(lacking, last) > BUSY:  # for two intervals in a row
            quiet = threading.Event()
            threading.Thread(target=_keep_idle_threads, args=(quiet,), daemon=True).start()
            on_busy(lacking)
            if not logged:
                logger.info(
                    f"busy: other processes keep {lacking:.1f} threads of this run waiting for a core, on average. "
                    "Stop them, or expect half the speed at best; meanwhile waiting threads sleep instead of spinning."
                )
                logged = True
        elif quiet is not None and lacking < QUIET:
            quiet.set()
            quiet = None
        last = lacking
    if quiet is not None:
        quiet.set()


def _keep_idle_threads(quiet: threading.Event) -> None:
    """Starts an idle team of this thread's own, which libgomp ends with the thread."""
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL)
    count = max(2, available_cores() - torch.get_num_threads() + 2)
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
