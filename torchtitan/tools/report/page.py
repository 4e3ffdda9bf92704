"""Renders runs into `page.html`, as one file that makes no network requests."""

import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.config import JobConfig
from torchtitan.config.compare import SEED_KEY, ShownValues, default_values, differing, display, seed_groups
from torchtitan.config.fields import fields_by_key
from torchtitan.errors import UserError, counted, require_report_extra
from torchtitan.logging import logger
from torchtitan.tools.report.run import CURVES, Phase, ReportError, Run, read_run
from torchtitan.tools.report.series import downsample, on_one_grid

POINTS = 4000  # per curve; a screen is no wider
ALL_POINTS = 160_000  # for all curves: about 4 MB, plus 5 MB of plotly
FEWEST_POINTS = 400
MARKS_PER_KIND = 2000  # marks of each kind on the time axis
SAMPLED_STEPS = 20
LAST_STEPS = 20
LONGEST_SAMPLE = 4000  # characters

REPORT = "report.html"
HIGH_PRECISION = "bf16"
UNKNOWN = "?"


def write_at_end(dump_folder: Path) -> None:
    """Writes a run's `report.html` to its dump folder. Failures are only warnings, because the run itself succeeded."""
    try:
        write_page(render([read_run(dump_folder)]), dump_folder / REPORT)
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        logger.warning(f"metrics.report: {REPORT} could not be written ({reason})")
    else:
        logger.info(f"wrote {dump_folder / REPORT}")


def render(runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """The HTML for runs, with a note for each thing that is not shown. Raises a UserError if packages are missing."""
    require_report_extra("A report (python -m torchtitan.tools.report)", "plotly", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("torchtitan.tools.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    configs = [run.config for run in runs]
    groups = seed_groups(configs)
    keys = _keys(configs, groups)
    color_of = {index: number % 8 for number, group in enumerate(groups) for index in group}
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=[_described(run, color_of[index]) for index, run in enumerate(runs)],
        notes=[*notes, *(f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes)],
        lines=[{"name": _name(runs, group), "color": number % 8} for number, group in enumerate(groups)],
        difference=_difference(runs, keys) if len(runs) > 1 else None,
        keys_of_runs=keys,
        data=_data(runs, groups),
        plotly=get_plotlyjs(),
        nonce=os.urandom(16).hex(),
    )


def write_page(page: str, path: Path) -> None:
    """Writes atomically, so that nobody sees a partial page. Raises a ReportError if it cannot be written."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}); set another file with --output.") from error


# Data for page.js


def _data(runs: Sequence[Run], groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Runs with their curves and marks, and the lines to draw: a run each, or the seeds of one configuration."""
    curves = [(run, key) for run in runs for key in CURVES if key in run.series]
    points = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // len(curves)))
    lines = []
    for group in groups:
        members = [runs[index] for index in group]
        bands = {}
        for key in CURVES if len(group) > 1 else ():
            if all(key in run.series for run in members):
                bands[key] = on_one_grid([run.series[key] for run in members], points // 2)
        lines.append({"name": _name(runs, group), "members": list(group), "bands": bands})
    return {
        "runs": [
            {
                "name": run.name,
                "tokens_per_step": run.tokens_per_step,
                "last_step": run.last_step,
                "series": {key: downsample(run.series[key], points) for key in CURVES if key in run.series},
                "starts": _thinned([{"step": start["step"], "title": _start(start)} for start in run.events["start"]]),
                "stages": _thinned([{"step": event["step"], "name": _stage(event)} for event in run.events["stage"]]),
                "checkpoints": _thinned([event["step"] for event in run.events["checkpoint"]]),
                "busy": _thinned([event["step"] for event in run.events["busy"]]),
                "skipped": _thinned(run.skipped),
                "not_finite": _thinned(_not_finite(run)),
                "phases": _phases(run),
                "numerics": _heat_map(run),
            }
            for run in runs
        ],
        "lines": lines,
    }


def _name(runs: Sequence[Run], group: Sequence[int]) -> str:
    """The name of a line: the run's, or the common prefix of the seeds' names."""
    names = [runs[index].name for index in group]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names)  # noqa: RUF071  letter by letter, as meant
    common = common.rstrip("-_./ 0123456789").removesuffix("seed").rstrip("-_./ ")
    return f"{common or names[0]} ({len(names)} seeds)"


def _thinned(marks: list[Any]) -> list[Any]:
    return marks[:: -(-len(marks) // MARKS_PER_KIND)] if marks else []


def _start(start: Mapping[str, Any]) -> str:
    title = f"{'resumed' if start['step'] else 'started'} after step {start['step']:,}"
    if isinstance(processes := start.get("processes"), int):
        title += f", {counted(processes, 'process')}"
    return "; ".join([title, *_changes(start)])


def _stage(event: Mapping[str, Any]) -> str:
    return display(event.get("name") or f"batches of {display(event.get('batch_size', UNKNOWN))}")


def _changes(start: Mapping[str, Any]) -> list[str]:
    """The keys that this start has changed, with both values."""
    changed = start.get("changed")
    return [
        f"{key} = {display(values[1])} (was {display(values[0])})"
        for key, values in (changed.items() if isinstance(changed, dict) else ())
        if isinstance(values, list) and len(values) == 2
    ]


def _not_finite(run: Run) -> list[Any]:
    loss = run.series.get("loss")
    return [] if loss is None else list(loss.steps[np.isnan(loss.values)].tolist())


def _phases(run: Run) -> list[dict[str, Any]]:
    """The phases of a precision schedule that the run has reached; empty without a schedule."""
    if len(run.phases) < 2:
        return []
    phases, first = [], 0
    for phase in run.phases:
        last = run.last_step if phase.last_step is None else min(phase.last_step, run.last_step)
        if last > first:
            name = display(phase.precision)
            phases.append({"name": name, "from": first, "to": last, "low": name != HIGH_PRECISION})
        first = last
    return phases


def _heat_map(run: Run) -> dict[str, Any] | None:
    """From the numerics report: a row for each block, a column for each layer in it, a panel for each GEMM."""
    if run.numerics is None:
        return None
    at = {_block_and_rest(fqn): products for fqn, products in run.numerics.layers.items()}
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*at, strict=True))
    panels = []
    for product in dict.fromkeys(product for products in at.values() for product in products):
        cells = [[at.get((row, column), {}).get(product) for column in columns] for row in rows]
        panels.append(
            {
                "product": product,
                **{
                    key: [[_rounded(getattr(cell, key, None)) for cell in row] for row in cells]
                    for key in ("sqnr_db", "saturated", "flushed")
                },
            }
        )
    return {"rows": rows, "columns": columns, "panels": panels}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _block_and_rest(fqn: str) -> tuple[str, str]:
    """'layers.3.attention.wq' to ('layers.3', 'attention.wq'); a layer outside blocks goes to a row 'model'."""
    words = fqn.split(".")
    at = next((index for index, word in enumerate(words) if word.isdecimal()), None)
    return ("model", fqn) if at is None else (".".join(words[: at + 1]), ".".join(words[at + 1 :]))


# Content of page.html


def _described(run: Run, color: int) -> dict[str, Any]:
    last_start = run.events["start"][-1] if run.events["start"] else {}
    description = (run.config or {}).get("job.description")
    facts = [last_start.get(key) for key in ("model", "device", "layout")]
    if last_start.get("processes", 1) != 1:
        facts.append(f"{display(last_start['processes'])} processes")
    if "torch" in last_start:
        facts.append(f"torch {display(last_start['torch'])}")
    return {
        "name": run.name,
        "color": color,
        "description": description if isinstance(description, str) else "",
        "facts": [display(fact) for fact in facts if fact],
        "summary": _summary(run),
        "mean_loss": _last_loss(run) or math.inf,
        "conversion": [_conversion(phase) for phase in run.phases],
        "numerics": run.numerics,
        **_samples(run),
    }


def _summary(run: Run) -> list[dict[str, Any]]:
    """Summary figures, each with its name, value and meaning."""

    def column(key: str) -> list[float]:
        return run.series[key].finite.tolist() if key in run.series else []

    loss, validation, memory = _last_loss(run), column("validation_loss"), column("peak_memory_bytes")
    rates, mfu, waits = column("tokens_per_second"), column("mfu"), column("data_wait_share")
    seconds, shares, seen = column("step_seconds"), column("memory_share"), column("tokens_seen")
    total = (run.config or {}).get("training.steps")
    of_total = f"of {total:,}" if isinstance(total, int) and total else ""
    starts = run.events["start"]
    figures = [
        ("Steps", f"{run.last_step:,}", of_total if total != run.last_step else "finished"),
        ("Training loss", f"{loss:.4f}" if loss else None, f"mean of the last {LAST_STEPS} steps"),
        (
            "Validation loss",
            f"{validation[-1]:.4f}" if validation else None,
            f"lowest {min(validation):.4f}" if validation else "",
        ),
        ("Tokens", _human(seen[-1]) if seen else None, f"{_human(run.tokens_per_step or 0)} per step" if seen else ""),
        (
            "Tokens/s per device",
            f"{statistics.median(rates):,.0f}" if rates else None,
            f"{statistics.median(seconds):.3g} s per step" if seconds else "",
        ),
        ("MFU", f"{statistics.median(mfu):.1%}" if mfu else None, "median"),
        (
            "Peak memory",
            f"{max(memory) / 2**30:.2f} GiB" if memory else None,
            f"{max(shares):.0%} of the device" if shares else "",
        ),
        ("Data wait", f"{statistics.fmean(waits):.1%}" if waits else None, "of the time"),
        (
            "Restarts",
            str(len(starts) - 1) if starts else None,
            "; ".join(f"from step {start['step']:,}: {change}" for start in starts for change in _changes(start)),
        ),
    ]
    return [{"name": name, "value": value, "detail": detail} for name, value, detail in figures]


def _last_loss(run: Run) -> float | None:
    """The mean of the last steps, by which runs are ranked: single steps differ by their batches alone."""
    if (loss := run.series.get("loss")) is None:
        return None
    last = loss.values[loss.steps > run.last_step - LAST_STEPS]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None


def _human(number: float) -> str:
    """1,234 or 12.3M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def _keys(configs: Sequence[ShownValues | None], groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """A row for each key that any run has: its default, and each line's distinct values and whether one differs."""
    defaults, fields = default_values(), fields_by_key(JobConfig)
    rows = []
    for key in dict.fromkeys(key for config in configs for key in config or ()):
        values = []
        plain = key.split(".", 2)[-1] if key.startswith("stage.") else key  # the key that a stage sets
        for group in groups:
            members = [configs[index] or {} for index in group]
            texts = dict.fromkeys(display(member[key]) if key in member else UNKNOWN for member in members)
            differs = any(key in member and member[key] != defaults.get(key) for member in members)
            values.append({"text": ", ".join(texts), "differs": differs})
        rows.append(
            {
                "key": key,
                "help": fields[plain].help if plain in fields else "",
                "default": "the run's" if plain != key else display(defaults[key]) if key in defaults else "custom key",
                "values": values,
                "differs": any(value["differs"] for value in values),
            }
        )
    return rows


def _difference(runs: Sequence[Run], keys: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of `_keys` that differ between runs, and the names of runs whose configuration is unknown."""
    names = set(differing([run.config for run in runs]))
    rows = [row for row in keys if row["key"] in names]
    rows.sort(key=lambda row: row["key"] == SEED_KEY)  # the least informative one last
    return {"rows": rows, "unknown": [run.name for run in runs if run.config is None]}


def _conversion(phase: Phase) -> dict[str, Any]:
    """A row for layers of different blocks with the same outcome, with the rule that decided it."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for layer in phase.layers:
        name = ".".join("*" if word.isdecimal() else word for word in layer.fqn.split("."))
        precision = f"{display(layer.converter)} {display(layer.recipe)}" if layer.converted else HIGH_PRECISION
        rows[name, layer.m, layer.k, layer.n, precision, bool(layer.converted), display(layer.reason)] += 1
    taken = [layer for layer in phase.layers if layer.converted]
    weights, low = (sum(of.k * of.n * max(1, of.experts) for of in layers) for layers in (phase.layers, taken))
    names = ("name", "m", "k", "n", "precision", "low", "reason")
    return {
        "title": display(phase.precision) if phase.precision else "",
        "last_step": phase.last_step,
        "rows": [{**dict(zip(names, key, strict=True)), "count": count} for key, count in rows.items()],
        "taken": len(taken),
        "all": len(phase.layers),
        "share": low / weights if weights else 0,
    }


def _samples(run: Run) -> dict[str, Any]:
    """By step, newest first. If there are many steps, an evenly spaced selection."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for sample in run.samples:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step, reverse=True)
    chosen = np.unique(np.linspace(0, len(steps) - 1, SAMPLED_STEPS).round().astype(int)) if steps else ()
    samples = [
        {
            "step": steps[place],
            "texts": [{key: _cut(sample[key]) for key in ("prompt", "text")} for sample in by_step[steps[place]]],
        }
        for place in chosen
    ]
    return {"samples": samples, "sampled_steps": len(steps)}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} … ({len(text):,} characters)"
