"""Logging: `from torchtitan.logging import logger`, and `init_logging` once at startup."""

import contextlib
import logging
import os
import sys
from typing import Any, TextIO, cast

logger = logging.getLogger("torchtitan")

# Their messages are of no use to users: torchao kernels not built for this torch, a deprecation inside torchao.
NOISY_LOGGERS = ("torchao", "torch.utils._pytree")

GREY, YELLOW, RED, RESET = "\033[90m", "\033[33m", "\033[31m", "\033[0m"


class Lossy:
    """A stream that drops output it cannot write, where Python's would raise: its reader is gone (`| head`, a closed
    terminal) or the disk is full."""

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


def outlive_readers() -> None:
    """From now on, a closed stdout or stderr does not end the run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  None if the shell closed it (`>&-`)
        setattr(sys, name, cast(TextIO, Lossy(stream)))


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
        line = super().formatMessage(record)
        if record.levelno < logging.WARNING:
            return line
        level = record.levelname
        if self.color:
            level = f"{YELLOW if record.levelno < logging.ERROR else RED}{level}{RESET}"
        return f"{self.rank_prefix}{level} {line}"


def init_logging(rank: int, world_size: int, color: bool) -> None:
    """Sends the "torchtitan" logger to stdout: INFO and above on rank 0, WARNING and above on the others.

    Call it before torchao is imported, so that it silences torchao's startup messages. Calling it again replaces the
    previous setup.

    Args:
        color: use ANSI colors if stdout is a terminal.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(ConsoleFormatter(rank, world_size, color and sys.stdout.isatty()))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # or a library that configures the root logger would print our lines twice
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler prints a line at each start and stop
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
