"""Plots the load of a run's experts as a PNG: each expert's share at the end, and the most and least used over time.

python scripts/plot_experts.py outputs/a --output experts.png
"""

import argparse
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # a KeyboardInterrupt inside an import would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
from plot_run import PlotError, load, metrics_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.errors import UserError, require_report_extra
from torchtitan.files import local_path

LAST = 10  # entries that the heat map averages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=local_path, metavar="RUN", help="dump folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "--output", type=local_path, default="experts.png", help="PNG file to write (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        require_report_extra("scripts/plot_experts.py", "matplotlib")
        plot(metrics_file(arguments.run), arguments.output)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"wrote {arguments.output}")


def plot(file: Path, output: Path) -> None:
    entries = [entry for entry in load(file) if "expert_load" in entry]
    if not entries:
        raise PlotError(f"{file} has no load of experts: the model of this run has none")
    layers = list(entries[-1]["expert_load"])
    loads = np.array([[entry["expert_load"][layer] for layer in layers] for entry in entries])  # entry, layer, expert
    steps = [entry["step"] for entry in entries]
    end = loads[-LAST:].mean(0)
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    figure = Figure(figsize=(12, 1.6 + 0.32 * max(len(layers), 8)))
    heat, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(end.max())))
    image = heat.imshow(end, aspect="auto", cmap="RdBu_r", norm=norm)
    heat.set(xlabel="Expert", ylabel="Layer", title=f"Load, mean of the last {min(LAST, len(entries))} reports")
    heat.set_yticks(range(len(layers)), [layer.split(".")[1] for layer in layers])
    figure.colorbar(image, ax=heat, label="of the layer's mean")
    curves.plot(steps, loads.max((1, 2)), color="C3")
    curves.plot(steps, loads.min((1, 2)), color="C0")
    curves.axhline(1.0, color="0.6", linewidth=0.8)
    for values, name in ((loads.max((1, 2)), "most used"), (loads.min((1, 2)), "least used")):
        curves.annotate(name, (steps[-1], values[-1]), xytext=(4, 0), textcoords="offset points", va="center")
    curves.set(xlabel="Step", ylabel="Load, of the layer's mean", title="Of all layers")
    curves.set_ylim(bottom=0)
    curves.margins(x=0.18)
    curves.grid(alpha=0.25)
    curves.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150, format="png")
    except OSError as error:
        raise PlotError(f"--output {output} cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    main()
