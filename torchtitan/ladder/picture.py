"""A ladder as a picture: the loss of each run over its parameters, the fitted law, and the prediction."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from torchtitan.ladder.fit import CONFIDENCE, Fit, Interval, Row
from torchtitan.ladder.shapes import short


def draw(
    series: Mapping[str, Sequence[Row]],
    law: Fit,
    predicted: Row,
    interval: Interval,
    measured: float | None,
    path: Path,
) -> None:
    """Writes a PNG.

    Args:
        series: the runs by their number of tokens, or of tokens per parameter.
        predicted: the size to predict; its loss is the law's.
        measured: its loss, if it has been trained.
    """
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, (name, rows) in enumerate(series.items()):
        sizes, tokens = [row.parameters for row in rows], [row.tokens for row in rows]
        axes.plot(sizes, [row.loss for row in rows], "o", color=f"C{number}", label=name)
        grid = np.geomspace(min(sizes), predicted.parameters)
        # tokens of this series: constant, or in a constant ratio to the parameters
        power = np.polyfit(np.log(sizes), np.log(tokens), 1)[0].round()
        axes.plot(grid, [law.loss(n, tokens[0] * (n / sizes[0]) ** power) for n in grid], color=f"C{number}", lw=1)
    error = [[interval.value - interval.low], [interval.high - interval.value]]
    axes.errorbar(
        [predicted.parameters], [interval.value], error, fmt="D", color="black", capsize=4, mfc="white",
        label=f"predicted, {CONFIDENCE:.0%} interval",
    )  # fmt: skip
    if measured is not None:
        axes.plot([predicted.parameters], [measured], "x", color="red", markersize=9, label="measured")
    axes.set(xscale="log", xlabel="parameters without embedding and output layer", ylabel="held-out bits per byte")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_title(f"{law.formula}; {short(predicted.parameters)} parameters, {short(predicted.tokens)} tokens")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, format="png")
