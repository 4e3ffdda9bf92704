"""What a ladder prints and writes."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from torchtitan.device import find_device
from torchtitan.errors import aligned, counted
from torchtitan.metrics.flops import find_peak
from torchtitan.strict_json import finite
from torchtitan.tools.ladder.fit import CONFIDENCE, FinishedRun, Fit, Interval, fit
from torchtitan.tools.ladder.runs import Ladder, Rung, expected_seconds
from torchtitan.tools.ladder.shapes import short

MUCH_SCATTER = 0.01
USUAL_MFU = 0.2  # for the expected time, while no run is finished


def runs_table(runs: Sequence[Rung]) -> str:
    """A line for each run."""
    rows = [["run", "parameters", "layers", "width", "tokens", "steps", "lr", "FLOPs", "bits per byte"]]
    for rung in runs:
        shape, loss = rung.shape, rung.loss()
        sizes = [short(shape.parameters), str(shape.n_layers), str(shape.dim), short(rung.tokens)]
        training = [f"{rung.config.training.steps:,}", f"{rung.config.optimizer.lr:.2e}", f"{rung.flops:.2e}"]
        rows.append([rung.folder.name, *sizes, *training, "" if loss is None else f"{loss:.4f}"])
    return aligned(rows, left=0)


def time_left(ladder: Ladder, runs: Sequence[Rung]) -> str:
    """One sentence on how long the remaining runs take."""
    finished = [rung for rung in runs if rung.loss() is not None]
    left = [rung for rung in runs if rung not in finished]
    if not left:
        return "All runs are finished."
    flops = sum(rung.flops for rung in left)
    if finished:
        source = "at the speed of the finished runs"
        seconds = expected_seconds(left, finished, ladder.processes)
    else:
        source = f"at an MFU of {USUAL_MFU:.0%}, until a run shows it"
        device = find_device(0)
        peak = find_peak(device.type, device.name, torch.bfloat16)
        seconds = flops / (peak.flops * ladder.processes * USUAL_MFU) if peak else None
    time = "unknown" if seconds is None else f"{seconds / 60:,.0f} min, {source}"
    return f"{counted(len(left), 'run')} left, {flops:.2e} FLOPs; expected time: {time}."


def report(ladder: Ladder, folder: Path) -> None:
    """Fits, predicts, and writes ladder.txt, ladder.json and ladder.png."""
    series = {name: [rung.row() for rung in rungs] for name, rungs in ladder.rungs.items()}
    law = fit([row for rows in series.values() for row in rows])
    target = ladder.target
    predicted = law.predict(target.shape.parameters, target.tokens)
    measured = target.loss()
    text = "\n".join([runs_table([*ladder.by_cost, target]), "", *sentences(law, target, predicted, measured)])
    print(f"\n{text}")
    (folder / "ladder.txt").write_text(f"{text}\n", encoding="utf-8")
    content = {
        "runs": [{"name": rung.folder.name, **dataclasses.asdict(rung.row())} for rung in ladder.by_cost],
        "law": law.formula,
        "constants": {name: dataclasses.asdict(constant) for name, constant in law.constants.items()},
        "confidence": CONFIDENCE,
        "error": law.error,
        "prediction": {
            "parameters": target.shape.parameters,
            "tokens": target.tokens,
            **dataclasses.asdict(predicted),
            "measured": measured,
        },
    }
    (folder / "ladder.json").write_text(json.dumps(finite(content), indent=1), encoding="utf-8")
    draw_fit(series, law, target, predicted, measured, folder / "ladder.png")
    print(f"wrote {folder / 'ladder.txt'}, ladder.json, ladder.png")


def sentences(law: Fit, target: Rung, predicted: Interval, measured: float | None) -> list[str]:
    """The law and the prediction in words."""
    constants = (
        f"{name} {fitted.value:.3g} ({fitted.low:.3g} to {fitted.high:.3g})" for name, fitted in law.constants.items()
    )
    much = " The law does not describe them well: see the picture." if law.error > MUCH_SCATTER else ""
    off = f"; measured {measured:.4f}, from which it is {predicted.value / measured - 1:+.2%} off" if measured else ""
    return [
        f"L = {law.formula}: {', '.join(constants)}. The runs scatter by {law.error:.2%}.{much}",
        f"{short(target.shape.parameters)} parameters, {short(target.tokens)} tokens: prediction {predicted.value:.4f} "
        f"bits per byte ({CONFIDENCE:.0%} interval {predicted.low:.4f} to {predicted.high:.4f}){off}.",
    ]


def draw_fit(
    series: Mapping[str, Sequence[FinishedRun]],
    law: Fit,
    target: Rung,
    predicted: Interval,
    measured: float | None,
    path: Path,
) -> None:
    """Writes a PNG: the loss of each run over its parameters, by number of tokens or of tokens per parameter; the
    fitted law; and the prediction, with the measured loss once that size has been trained."""
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, (name, rows) in enumerate(series.items()):
        sizes, tokens = [row.parameters for row in rows], [row.tokens for row in rows]
        axes.plot(sizes, [row.loss for row in rows], "o", color=f"C{number}", label=name)
        grid = np.geomspace(min(sizes), target.shape.parameters)
        # tokens of this series: constant, or in a constant ratio to the parameters
        power = np.polyfit(np.log(sizes), np.log(tokens), 1)[0].round()
        axes.plot(grid, [law.loss(n, tokens[0] * (n / sizes[0]) ** power) for n in grid], color=f"C{number}", lw=1)
    error = [[predicted.value - predicted.low], [predicted.high - predicted.value]]
    axes.errorbar(
        [target.shape.parameters], [predicted.value], error, fmt="D", color="black", capsize=4, mfc="white",
        label=f"predicted, {CONFIDENCE:.0%} interval",
    )  # fmt: skip
    if measured is not None:
        axes.plot([target.shape.parameters], [measured], "x", color="red", markersize=9, label="measured")
    axes.set(xscale="log", xlabel="parameters without embedding and output layer", ylabel="held-out bits per byte")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_title(f"{law.formula}; {short(target.shape.parameters)} parameters, {short(target.tokens)} tokens")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, format="png")
