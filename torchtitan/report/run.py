"""Reads what a run left in its dump folder. Any part may be missing or damaged; a note then says so.

| file | written by |
|---|---|
| `metrics.jsonl`, `events.jsonl`, `skipped_updates.jsonl`, `config.toml`, `conversion.json`, checkpoints | every run |
| `numerics.json` | `scripts/numerics_report.py --output RUN/numerics` |
| `samples.jsonl` | a run with `validation.sample_prompts`: lines of `step`, `prompt`, `text` |
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchtitan.config.manager import tomllib
from torchtitan.errors import UserError
from torchtitan.files import is_uri, regular_file
from torchtitan.report.compare import Values, flat, shown
from torchtitan.report.series import Floats, Series

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
SHOWN = (*CURVES, "step_seconds", "memory_share", "tokens_seen")
CHUNK = 10_000  # lines
LARGEST_STEP = 2**53  # larger integers are not exact in a browser


class ReportError(UserError):
    """The runs cannot be shown, or the page cannot be written."""


@dataclass
class Run:
    """One run, as read.

    Attributes:
        name: short, and unique within a report.
        series: by key of metrics.jsonl.
        starts, checkpoints, stages: from events.jsonl, in order; each has `step`.
        busy: from events.jsonl: when other processes kept the run's threads waiting for a core.
        skipped: steps whose updates were skipped.
        config: None if unknown.
        phases: from conversion.json: `precision`, `last_step` and `layers`; a run without a schedule has one.
        notes: one sentence for each missing or damaged part.
    """

    folder: Path
    name: str
    series: dict[str, Series]
    starts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    busy: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    config: Values | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    numerics: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max(int(series.steps[-1]) for series in self.series.values())

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of the global batch, from the last entry."""
        tokens = self.series.get("tokens_seen")
        found = float(tokens.values[-1] / tokens.steps[-1]) if tokens and tokens.steps[-1] else 0
        return found if found > 0 else None

    @property
    def total_steps(self) -> int | None:
        steps = (self.config or {}).get("training.steps")
        return steps if isinstance(steps, int) else None


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs that can be shown, and a sentence for each one that cannot. Raises a ReportError if none can be
    shown."""
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
    for read in (_read_config, _read_events, _read_skipped, _read_conversion, _read_numerics, _read_samples):
        read(run)
    return run


def _read_metrics(run: Run) -> None:
    """Reads column by column, in chunks of lines: a million lines take seconds."""
    parts: dict[str, list[tuple[NDArray[np.int64], Floats]]] = {}
    entries = (entry for entry in _lines(run, METRICS) if step_of(entry) is not None)
    while chunk := list(itertools.islice(entries, CHUNK)):
        for key in SHOWN:
            found = [(entry["step"], entry[key]) for entry in chunk if key in entry]
            if found:
                steps, values = zip(*found, strict=True)
                parts.setdefault(key, []).append((np.array(steps, dtype=np.int64), _floats(values)))
    for key, of_key in parts.items():
        all_steps, all_values = (np.concatenate(arrays)[::-1] for arrays in zip(*of_key, strict=True))
        # Lines are in order unless files were concatenated. The last line of a step is used.
        places = np.unique(all_steps, return_index=True)[1]
        run.series[key] = Series(all_steps[places], all_values[places])


def _floats(values: Sequence[Any]) -> Floats:
    """NaN for anything that is not a finite number."""
    try:
        found = np.array(values, dtype=np.float64)  # None becomes NaN
    except (ValueError, TypeError, OverflowError):
        found = np.array([_as_float(value) for value in values])
    return np.where(np.isfinite(found), found, np.nan)


def _read_config(run: Run) -> None:
    values = _part(run, "config.toml", lambda text: flat(tomllib.loads(text)), "the configuration is omitted")
    run.config = values or None


def _read_events(run: Run) -> None:
    if (run.folder / "events.jsonl").exists():
        events = [event for event in _lines(run, "events.jsonl") if step_of(event) is not None]
        run.starts = [event for event in events if event.get("event") == "start"]
        run.checkpoints = [event for event in events if event.get("event") == "checkpoint"]
        run.stages = [event for event in events if event.get("event") == "stage"]
        run.busy = [event for event in events if event.get("event") == "busy"]
        if run.busy:
            run.notes.append(
                f"other processes used the cores of this run (first in step {run.busy[0]['step']:,}), so its speed "
                "says little."
            )
        return
    run.notes.append("events.jsonl is missing: restarts are unknown, and only the checkpoints still on disk are shown.")
    folder = str((run.config or {}).get("checkpoint.folder", "checkpoint"))
    there = [] if is_uri(folder) else (run.folder / folder).glob("step-*")  # a report needs no network
    names = [path.name.removeprefix("step-") for path in there if path.is_dir()]
    run.checkpoints = [{"step": step} for step in sorted(int(name) for name in names if name.isdecimal())]


def _read_skipped(run: Run) -> None:
    if (run.folder / "skipped_updates.jsonl").exists():
        steps = (step_of(entry) for entry in _lines(run, "skipped_updates.jsonl"))
        run.skipped = [step for step in steps if step is not None]


def _read_conversion(run: Run) -> None:
    def phases(text: str) -> list[dict[str, Any]]:
        content = json.loads(text)
        if not (isinstance(content, list) and all(isinstance(item, dict) for item in content)):
            raise ValueError("it is not a list of layers or phases")
        if not content or "fqn" in content[0]:
            content = [{"precision": None, "last_step": None, "layers": content}]
        for phase in content:
            phase["layers"] = [
                {
                    **layer,
                    "fqn": str(layer["fqn"]),
                    **{size: int(layer[size]) for size in ("m", "k", "n")},
                    "experts": int(layer.get("experts", 0)),
                }
                for layer in phase["layers"]
            ]
            phase["last_step"] = None if phase["last_step"] is None else int(phase["last_step"])
        return content

    run.phases = _part(run, "conversion.json", phases, "the table of layers is omitted", optional=True) or []


def _read_numerics(run: Run) -> None:
    def numerics(text: str) -> dict[str, Any]:
        content = json.loads(text)
        layers = {
            str(fqn): {
                str(product): {key: _as_float(values[key]) for key in ("sqnr_db", "saturated", "flushed")}
                for product, values in products.items()
            }
            for fqn, products in content["layers"].items()
        }
        if not layers:
            raise ValueError("it has no layers")
        proposed = [str(fqn) for fqn in content.get("proposed_filter_fqns", [])]
        return {
            "recipe": shown(content.get("recipe", "")),
            "steps": content.get("steps"),
            "layers": layers,
            "proposed": proposed,
        }

    run.numerics = _part(run, "numerics.json", numerics, "the heat map is omitted", optional=True)


def _read_samples(run: Run) -> None:
    if not (run.folder / "samples.jsonl").exists():
        return
    for entry in _lines(run, "samples.jsonl"):
        step, text = step_of(entry), entry.get("text")
        if step is not None and isinstance(text, str):
            run.samples.append({"step": step, "prompt": str(entry.get("prompt") or ""), "text": text})


def _part(run: Run, name: str, parse: Callable[[str], T], consequence: str, optional: bool = False) -> T | None:
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


def _lines(run: Run, name: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. Invalid lines, such as a truncated last one, are skipped with a note."""
    damaged = 0
    try:
        with regular_file(run.folder / name).open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    entry = None
                if isinstance(entry, dict):
                    yield entry
                elif line.strip():
                    damaged += 1
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror}).")
    if damaged:
        count = f"{damaged:,} lines are" if damaged > 1 else "1 line is"
        run.notes.append(f"{name}: {count} damaged or truncated, and skipped.")


def step_of(entry: dict[str, Any]) -> int | None:
    step = entry.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= LARGEST_STEP else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_float(value: Any) -> float:
    """NaN for anything that is not a finite number."""
    try:
        number = float(value) if _is_number(value) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
