"""Plots curves of one or several runs from their metrics.jsonl as a PNG.

python scripts/plot_run.py outputs/a outputs/b --keys loss,grad_norm --smooth 10 --output loss.png
"""

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # a KeyboardInterrupt inside an import would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.errors import UserError, require_report_extra
from torchtitan.files import local_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Entry = dict[str, Any]
Points = tuple[list[float], list[float]]

TITLES = {
    "step": "Step",
    "loss": "Loss",
    "validation_loss": "Validation loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens / s per device",
    "tokens_seen": "Tokens seen",
    "mfu": "MFU",
    "peak_memory_bytes": "Peak memory (bytes)",
    "data_wait_share": "Fraction of time waiting for data",
    "step_seconds": "Step time (s)",
}


class PlotError(UserError):
    """A run that has nothing to plot, or a flag that does not fit it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=local_path, nargs="+", metavar="RUN", help="dump folder of a run, or a metrics.jsonl file"
    )
    parser.add_argument(
        "--output", type=local_path, default="loss.png", help="PNG file to write (default: %(default)s)"
    )
    parser.add_argument("--keys", default="loss", help="metrics to plot, comma-separated (default: %(default)s)")
    parser.add_argument("--x", default="step", help="x axis, such as tokens_seen (default: %(default)s)")
    parser.add_argument("--smooth", type=int, default=1, help="reports per moving average (default: no smoothing)")
    arguments = parser.parse_args()
    try:
        require_report_extra("scripts/plot_run.py", "matplotlib")
        if arguments.smooth < 1:
            raise PlotError(f"--smooth {arguments.smooth}: must be at least 1")
        keys = [key.strip() for key in arguments.keys.split(",") if key.strip()]
        files = [metrics_file(run) for run in arguments.runs]
        runs = {label: load(file) for label, file in zip(labels(files), files, strict=True)}
        plot(runs, keys, arguments.x, arguments.smooth, arguments.output)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"wrote {arguments.output}")


def metrics_file(run: Path) -> Path:
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise PlotError(f"no such run: {path} does not exist; pass the dump folder of a run or its metrics.jsonl")
    return path


def labels(files: list[Path]) -> list[str]:
    """The folder name of each run, with as many parent folders as needed to tell the runs apart."""
    paths = [file.resolve().parent if file.name == "metrics.jsonl" else file.resolve() for file in files]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise PlotError("the same run is given twice")


def load(file: Path) -> list[Entry]:
    entries = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the line that a running job is still writing
        if isinstance(entry, dict):
            entries.append(entry)
    if not entries:
        raise PlotError(f"{file} holds no entries yet")
    return entries


def points(run: str, entries: list[Entry], x: str, y: str) -> Points:
    """The values of `y` over `x`. A null (NaN in the run) leaves a gap in the curve."""
    drawn = [entry for entry in entries if x in entry and y in entry and entry[x] is not None]
    if not drawn:
        for key in (x, y):
            if not any(key in entry for entry in entries):
                known = sorted({name for entry in entries for name in entry})
                raise PlotError(f"{run} has no key {key}; it has {', '.join(known)}")
        raise PlotError(f"{run} has no entry with both {x} and {y}")
    ys = [float("nan") if entry[y] is None else float(entry[y]) for entry in drawn]
    return [float(entry[x]) for entry in drawn], ys


def moving_average(values: list[float], width: int) -> list[float]:
    """Mean over the last `width` values; fewer at the start."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def plot(runs: dict[str, list[Entry]], keys: list[str], x: str, smooth: int, output: Path) -> None:
    if not keys:
        raise PlotError("--keys is empty: set one or more, such as loss,grad_norm")
    from matplotlib.figure import Figure  # needs no display and no global pyplot state
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(9, 1.2 + 3.6 * len(keys)))
    grid = figure.subplots(len(keys), 1, sharex=True, squeeze=False)
    for axes, key in zip(grid[:, 0], keys, strict=True):
        for number, (run, entries) in enumerate(runs.items()):
            draw(axes, run, entries, x, key, smooth, f"C{number % 10}")
        decorate(axes, key)
    bottom = grid[-1, 0]
    bottom.set_xlabel(TITLES.get(x, x))
    if x == "step":
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif x == "tokens_seen":
        bottom.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.tight_layout()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150, format="png")
    except OSError as error:
        raise PlotError(f"--output {output} cannot be written: {error.strerror or error}") from error


def draw(axes: "Axes", run: str, entries: list[Entry], x: str, key: str, smooth: int, color: str) -> None:
    xs, ys = points(run, entries, x, key)
    marker = "o" if key == "validation_loss" or len(xs) == 1 else None
    if smooth > 1:
        axes.plot(xs, ys, color=color, alpha=0.25, linewidth=1)
        ys = moving_average(ys, smooth)
    axes.plot(xs, ys, color=color, linewidth=1.6, marker=marker, markersize=5, label=run)
    if key == "loss" and any("validation_loss" in entry and x in entry for entry in entries):
        xs, ys = points(run, entries, x, "validation_loss")
        axes.scatter(xs, ys, color=color, marker="D", edgecolors="white", zorder=3, label=f"{run} (validation)")


def decorate(axes: "Axes", key: str) -> None:
    axes.set_ylabel(TITLES.get(key, key))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize="small")


if __name__ == "__main__":
    main()
