"""Destinations of metrics: each writer takes the values of one step and has `close()`."""

import errno
import itertools
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan.errors import counted, require_report_extra
from torchtitan.launcher.folder_lock import is_removed
from torchtitan.logging import logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Value = float | int | None
"""Finite; None if the number is unknown or was not finite."""


class Writer(Protocol):
    """A destination of metrics. `write` takes a step's values by name, `write_text` a text; `close` comes last."""

    def write(self, step: int, values: Mapping[str, Value]) -> None: ...

    def write_text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class JSONLWriter:
    """`metrics.jsonl`: one strict JSON object per line, written out at once. The first line creates the file, and so
    does the next line after someone has removed it. Before the first line nothing is changed: a start may fail.

    On resume, lines of steps after `start_step` are dropped, since those steps run again: a killed run wrote them after
    its last checkpoint. A line truncated by the kill is dropped too. A run from step 0 starts a new file, and renames
    an old one to `metrics.1.jsonl`, `metrics.2.jsonl`, ... With `start_step` None, lines are added to what is there.

    A line that cannot be written (such as on a full disk) is dropped and counted; the run does not end for it.
    """

    def __init__(self, path: Path, start_step: int | None) -> None:
        self.path = path
        self.start_step = start_step
        self.lost_lines = 0
        self.file: FileIO | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        try:
            _append(self._opened(step), line)
        except OSError as error:
            self.lost_lines += 1
            if self.lost_lines & (self.lost_lines - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                logger.error(
                    f"{self.path} cannot be written ({error.strerror}); {counted(self.lost_lines, 'line')} lost so "
                    "far. Training continues."
                )

    def write_text(self, step: int, name: str, text: str) -> None:
        """Does nothing: texts have files of their own."""

    def _opened(self, step: int) -> FileIO:
        if self.file is not None and _is_at(self.path, self.file):
            return self.file
        if self.file is not None:
            self.close()
            logger.warning(
                f"{self.path} was removed or replaced; its content is lost, and it continues from step {step}"
            )
        elif self.start_step is not None:
            # A start that was killed while it dropped lines has left this.
            self.path.with_name(f"{self.path.name}.tmp").unlink(missing_ok=True)
            if self.start_step == 0:
                set_files_aside([self.path])
            else:
                drop_after(self.path, self.start_step)
            self.start_step = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = FileIO(self.path, "ab")
        return self.file

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return not is_removed(path)  # an open file can be written even if its folder denies permission


def _append(file: FileIO, line: bytes) -> None:
    """Appends the whole line, or nothing and raises an OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), size)
        raise


def set_files_aside(paths: Sequence[Path]) -> None:
    """Renames the non-empty ones of these files and folders, with one number for all: the first that is free."""
    paths = [path for path in paths if path.exists() and path.stat().st_size]
    if not paths:
        return
    for number in itertools.count(1):
        renamed = [path.with_suffix(f".{number}{path.suffix}") for path in paths]
        if not any(path.exists() for path in renamed):
            break
    for path, new in zip(paths, renamed, strict=True):
        path.rename(new)
    before, after = (", ".join(path.name for path in named) for named in (paths, renamed))
    logger.info(f"this run starts at step 0: renamed {before} of an earlier run to {after}")


def drop_after(path: Path, step: int) -> None:
    """Keeps only the complete lines up to `step`. The file is replaced atomically, so a kill here loses nothing."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and 0 <= step_of(line) <= step]
    if kept == lines:
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(path.stat().st_mode)
    temporary.replace(path)
    logger.info(
        f"{path.name}: dropped {counted(len(lines) - len(kept), 'line')} after step {step}, where this run resumes"
    )


def step_of(line: bytes) -> int:
    """The step of a line, or -1 if it is not one of ours."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return -1


class TensorBoardWriter:
    """Event files, one tag per key. TensorBoard hides what an earlier run wrote after `start_step`,
    unless that is None. The first value creates the folder: until then, another run's may be there.

    Each of the `stages` (last step and title) has a folder in it, which TensorBoard shows as a run: its charts know no
    other marks. Without titles there is only the folder itself.

    TensorBoard's writer does not recover from a full disk; it then gets no more values, and the run continues.
    """

    def __init__(self, folder: Path, start_step: int | None, stages: Sequence[tuple[int, str]] = ()) -> None:
        require_report_extra("metrics.enable_tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._begin: Callable[[Path, int | None], SummaryWriter]
        self._begin = lambda run, step: SummaryWriter(str(run), purge_step=step)
        self.folder = folder
        self.first_step = None if start_step is None else start_step + 1
        numbers = {title: number for number, title in enumerate(dict.fromkeys(title for _, title in stages), 1)}
        self.runs = [
            (last_step, folder / re.sub("[^0-9A-Za-z-]+", "_", f"{numbers[title]} {title}") if title else folder)
            for last_step, title in stages
        ] or [(0, folder)]
        self.open: dict[Path, SummaryWriter] | None = None
        self.last_step: dict[str, int] = {}  # name -> last step: lines of one step repeat what they have in common
        self.broken = False

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        def write(summary: "SummaryWriter") -> None:
            for name, value in values.items():
                if value is not None and self.last_step.get(name) != step:
                    summary.add_scalar(name, value, step)
                    self.last_step[name] = step

        self._attempt(step, write)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text that is shown as it is: TensorBoard renders Markdown, in which indented lines are code."""
        indented = textwrap.indent(text, "    ", lambda line: True)
        self._attempt(step, lambda summary: summary.add_text(name, indented, step))

    def _attempt(self, step: int, write: "Callable[[SummaryWriter], object]") -> None:
        if self.broken:
            return
        try:
            summary = self._summary(step)
            write(summary)
            summary.flush()
        except OSError as error:
            self.broken = True
            logger.error(
                f"TensorBoard files cannot be written ({error.strerror}); logging to them stops. Training continues."
            )

    def _summary(self, step: int) -> "SummaryWriter":
        """The writer of the stage of this step."""
        run = next((run for last_step, run in self.runs if step <= last_step), self.runs[-1][1])
        if self.open is None:
            earlier = self.folder.rglob("events.out.tfevents.*") if self.first_step is not None else ()
            self.open = {run: self._begin(run, self.first_step) for run in {file.parent for file in earlier}}
        elif run in self.open and is_removed(run):
            logger.warning(f"{run} was removed; its content is lost, and it continues from step {step}")
            del self.open[run]
        if run not in self.open:
            # A step even where there is nothing to hide: TensorBoard takes a folder's first one for its beginning.
            self.open[run] = self._begin(run, None if self.first_step is None else step)
        return self.open[run]

    def close(self) -> None:
        with suppress(OSError):  # already reported
            for summary in (self.open or {}).values():
                summary.close()
