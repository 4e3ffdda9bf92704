"""Logging: `from torchtitan.logging import logger`, and `init_logging` once at startup."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, TypeVar, cast

from typing_extensions import Self

from torchtitan.errors import printable

logger = logging.getLogger("torchtitan")
T = TypeVar("T")

# Their messages are of no use to users: torchao kernels not built for this torch, a deprecation inside torchao.
NOISY_LOGGERS = ("torchao", "torch.utils._pytree")

GREY, YELLOW, RED, RESET = "\033[90m", "\033[33m", "\033[31m", "\033[0m"


class DroppingStream:
    """A stream that drops what it cannot write: its reader is gone (`| head`, a closed terminal), the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def ignore_broken_pipes() -> None:
    """From now on, a closed stdout or stderr does not end the run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  None if the shell closed it (`>&-`)
        setattr(sys, name, cast(TextIO, DroppingStream(stream)))


class ConsoleFormatter(logging.Formatter):
    """`time message`; warnings and errors add the level and, in multi-process runs, the rank."""

    def __init__(self, rank: int, world_size: int, color: bool) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        self.rank_prefix = f"[rank {rank}] " if world_size > 1 else ""
        self.color = color

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        time = super().formatTime(record, datefmt)
        return f"{GREY}{time}{RESET}" if self.color else time

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        line = super().formatMessage(record)
        if record.levelno < logging.WARNING:
            return line
        level = record.levelname
        if self.color:
            level = f"{YELLOW if record.levelno < logging.ERROR else RED}{level}{RESET}"
        return f"{self.rank_prefix}{level} {line}"


class Waiting:
    """Context of slow work, whose progress it tells every `INTERVAL` seconds: in the log of a run, else on stderr.

    Args:
        title: of the work, such as "plan".
        total, unit: number of its items, and their name in the plural.
        count: tells how many are finished; by default the attribute `done`, which the caller increments.
    """

    INTERVAL = 10.0  # seconds

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", count: Callable[[], int] | None = None
    ) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, 0
        self._count = count or (lambda: self.done)
        self._start, self._ended = time.monotonic(), threading.Event()

    @classmethod
    def over(cls, items: Sequence[T], title: str, unit: str) -> Iterator[T]:
        """The items, one by one; each counts as finished when the next one is asked for."""
        with cls(title, len(items), unit) as waiting:
            for item in items:
                yield item
                waiting.done += 1

    def __enter__(self) -> Self:
        threading.Thread(target=self._report, daemon=True, name="progress").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _report(self) -> None:
        while not self._ended.wait(self.INTERVAL):
            line = f"{self.title}: {self.text()}"
            if logger.handlers:
                logger.info(line)
            else:
                print(printable(line), file=sys.stderr, flush=True)

    def text(self) -> str:
        """Finished items, time so far, and time left if that can be told."""
        seconds, done = time.monotonic() - self._start, self._count()
        finished = f"{done} of {self.total} {self.unit}, " if self.total else ""
        left = seconds / done * (self.total - done) if self.total and 0 < done < self.total else 0
        return f"{finished}{seconds:.0f} s so far" + (f", about {left:.0f} s left" if left else "")


def init_logging(rank: int, world_size: int, color: bool) -> None:
    """Sends the "torchtitan" logger to stdout: INFO and above on rank 0, WARNING and above on the others. Replaces an
    earlier setup. Call it before torchao is imported, so that it silences torchao's startup messages."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(ConsoleFormatter(rank, world_size, color and sys.stdout.isatty()))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # otherwise a library that configures the root logger would print our lines twice
    silence_profiler()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def silence_profiler() -> None:
    """Keeps torch's profiler from printing lines at each start and stop; call it before its first use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
