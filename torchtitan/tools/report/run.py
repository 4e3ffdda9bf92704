"""Reads what a run left in its dump folder. Any part may be missing or damaged; a note then says so.

| file | written by |
|---|---|
| `metrics.jsonl`, `events.jsonl`, `skipped_updates.jsonl`, `config.toml`, `conversion.json`, checkpoints | every run |
| `numerics.json` | `scripts/numerics_report.py --output RUN/numerics` |
| `samples.jsonl` | a run with `validation.sample_prompts`: lines of `step`, `prompt`, `text` |
"""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from annotated_types import MinLen
from pydantic import TypeAdapter

from torchtitan.config.compare import ShownValues, flat
from torchtitan.config.manager import tomllib
from torchtitan.errors import UserError, public
from torchtitan.files import is_uri, regular_file
from torchtitan.tools.report.series import Series

T = TypeVar("T")

METRICS = "metrics.jsonl"
CURVES = (
    "loss",
    "validation_loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
    "data_wait_share",
    "slowest_rank_ratio",
    "slowest_rank_wait_share",
    "slowest_rank",
    "expert_load_max",
    "expert_load_min",
    "router_entropy",
    "skipped_updates",
)
SHOWN_SERIES = (*CURVES, "step_seconds", "memory_share", "tokens_seen")
LARGEST_STEP = 2**53  # larger integers are not exact in a browser


class ReportError(UserError):
    """The runs cannot be shown, or the page cannot be written."""


@dataclass
class Layer:
    """Of conversion.json: a linear layer, as an (m, k) x (k, n) product."""

    fqn: str
    m: int
    k: int
    n: int
    experts: int = 0
    converted: Any = False
    converter: Any = ""
    recipe: Any = ""
    reason: Any = ""


@dataclass
class Phase:
    """Of conversion.json: a phase of the precision schedule. A run without a schedule has one."""

    precision: Any
    last_step: int | None
    layers: list[Layer]


@dataclass
class Errors:
    """Of a product in low precision: signal to noise, and shares of the operands."""

    sqnr_db: float | None
    saturated: float | None
    flushed: float | None


@dataclass
class Numerics:
    """numerics.json: the errors of each product, by layer."""

    layers: Annotated[dict[str, dict[str, Errors]], MinLen(1)]
    recipe: str = ""
    steps: Any = None
    proposed_filter_fqns: list[str] = field(default_factory=list)


PHASES = TypeAdapter(list[Phase] | list[Layer])
NUMERICS = TypeAdapter(Numerics)


@dataclass
class Run:
    """One run, as read."""

    folder: Path
    name: str  # short, and unique within a report
    series: dict[str, Series]  # key of metrics.jsonl -> values
    # `event` -> entries, in order.
    events: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    skipped: list[int] = field(default_factory=list)  # steps whose updates were skipped
    config: ShownValues | None = None  # None: unknown
    phases: list[Phase] = field(default_factory=list)
    numerics: Numerics | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # one sentence for each missing or damaged part

    @property
    def last_step(self) -> int:
        return max(int(series.steps[-1]) for series in self.series.values())

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of the global batch, from the last entry."""
        tokens = self.series.get("tokens_seen")
        per_step = float(tokens.values[-1] / tokens.steps[-1]) if tokens and tokens.steps[-1] else 0
        return per_step if per_step > 0 else None


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be shown, and a sentence for each one that cannot. Raises a ReportError if none can."""
    runs, problems = [], []
    for folder in {folder.resolve(): folder for folder in folders}.values():  # without duplicates
        try:
            runs.append(read_run(folder))
        except ReportError as error:
            problems.append(str(error))
    if not runs:
        raise ReportError("\n".join(problems))
    for run, name in zip(runs, distinct_names([run.folder for run in runs]), strict=True):
        run.name = name
    return runs, problems


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The folder's name for each, with as many parent folders as needed to make them unique."""
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def read_run(folder: Path) -> Run:
    """Reads everything available. Raises a ReportError if `folder` is not a run's, or has no metrics."""
    if not folder.exists():
        raise ReportError(f"{folder}: no such folder; give the dump folder of a run.")
    if not folder.is_dir():
        raise ReportError(f"{folder} is a file; give the dump folder of a run.")
    if not (folder / METRICS).exists():
        why = "is empty" if not any(folder.iterdir()) else f"holds no {METRICS}"
        raise ReportError(f"{folder} {why}, so it has no run to show; give the dump folder of a run.")
    run = Run(folder, folder.resolve().name, {})
    _read_metrics(run)
    if not run.series:
        raise ReportError(f"{folder / METRICS} holds no metrics yet, so there is nothing to show.")
    config = _part(run, "config.toml", _configuration, "the configuration is omitted", False)
    run.config = config or None
    _read_events(run)
    run.skipped = [entry["step"] for entry in read_lines(run.folder / "skipped_updates.jsonl", run.notes)]
    run.phases = _part(run, "conversion.json", _phases, "the table of layers is omitted") or []
    run.numerics = _part(run, "numerics.json", NUMERICS.validate_json, "the heat map is omitted")
    run.samples = [
        {"step": entry["step"], "prompt": str(entry.get("prompt") or ""), "text": entry["text"]}
        for entry in read_lines(run.folder / "samples.jsonl", run.notes)
        if isinstance(entry.get("text"), str)
    ]
    return run


def _read_metrics(run: Run) -> None:
    """Reads into arrays: a million lines take seconds, and no object for each number."""
    columns = {key: (array("q"), array("d")) for key in SHOWN_SERIES}
    for entry in read_lines(run.folder / METRICS, run.notes):
        step = entry["step"]
        for key in columns.keys() & entry.keys():
            steps, values = columns[key]
            steps.append(step)
            values.append(_finite(entry[key]))
    for key, (steps, values) in columns.items():
        if steps:
            # Lines are in order unless files were concatenated. The last line of a step is used.
            unique, places = np.unique(np.array(steps)[::-1], return_index=True)
            run.series[key] = Series(unique, np.array(values)[::-1][places])


def _read_events(run: Run) -> None:
    if (run.folder / "events.jsonl").exists():
        for event in read_lines(run.folder / "events.jsonl", run.notes):
            run.events[str(event.get("event"))].append(public(event))
        if busy := run.events["busy"]:
            run.notes.append(
                f"other processes used the cores of this run (first in step {busy[0]['step']:,}), so its speed says "
                "little."
            )
        return
    run.notes.append("events.jsonl is missing: restarts are unknown, and only the checkpoints still on disk are shown.")
    folder = str((run.config or {}).get("checkpoint.folder", "checkpoint"))
    paths = [] if is_uri(folder) else (run.folder / folder).glob("step-*")  # a report needs no network
    names = [path.name.removeprefix("step-") for path in paths if path.is_dir()]
    run.events["checkpoint"] = [{"step": step} for step in sorted(int(name) for name in names if name.isdecimal())]


def _phases(text: str) -> list[Phase]:
    content = PHASES.validate_json(text)
    layers = [item for item in content if isinstance(item, Layer)]
    phases = [item for item in content if isinstance(item, Phase)]
    return phases or [Phase(None, None, layers)]


def _configuration(text: str) -> ShownValues:
    return flat(public(tomllib.loads(text)))  # older versions wrote passwords


def _part(run: Run, name: str, parse: Callable[[str], T], consequence: str, optional: bool = True) -> T | None:
    """The result of `parse` on a file; None, with a note, if that fails."""
    path = run.folder / name
    try:
        return parse(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not optional:
            run.notes.append(f"{name} is missing: {consequence}.")
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror}): {consequence}.")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        run.notes.append(f"{name} is damaged: {consequence}.")
    return None


def read_lines(path: Path, notes: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file that have a step; none if it is missing. Invalid lines, such as a truncated last one,
    are skipped. `notes` gets a sentence on them, and if the file cannot be read; without it that is an OSError."""
    damaged = 0
    try:
        with regular_file(path).open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    entry = None
                if not isinstance(entry, dict):
                    damaged += bool(line.strip())
                elif type(step := entry.get("step")) is int and 0 <= step <= LARGEST_STEP:
                    yield entry
    except FileNotFoundError:
        pass
    except OSError as error:
        if notes is None:
            raise
        notes.append(f"{path.name} cannot be read ({error.strerror}).")
    if damaged and notes is not None:
        count = f"{damaged:,} lines are" if damaged > 1 else "1 line is"
        notes.append(f"{path.name}: {count} damaged or truncated, and skipped.")


def _finite(value: Any) -> float:
    """NaN for anything that is not a finite number."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
