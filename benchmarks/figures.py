"""Plots for the benchmarks: differences from a baseline, with curves labelled directly instead of in a legend."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = 3
GREY = "0.8"


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Over the last `width` values; over fewer at the start."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def percent_above(values: Sequence[float], base: Sequence[float], width: int) -> list[float]:
    """How far the moving mean of a loss is above the baseline's, in percent."""
    means, base_means = moving_mean(values, width), moving_mean(base, width)
    return [100 * (mean / base_mean - 1) for mean, base_mean in zip(means, base_means, strict=True)]


def small_multiples(losses: Mapping[str, Sequence[float]], output: Path, width: int) -> Any:
    """A panel for each run except the first: its loss relative to the first's, in front of the curves of all others.

    An outlier would compress the other curves, so it is clipped and the panel's title states its value.

    Args:
        losses: of each step, by name; the first is the baseline.
        width: steps in the moving mean.
    """
    plt = pyplot()
    (base_name, base), *others = losses.items()
    gaps = {name: percent_above(values, base, width) for name, values in others}
    steps = range(1, len(base) + 1)
    largest = sorted(max(map(abs, gap[width:] or gap)) for gap in gaps.values())
    limit = 1.3 * largest[3 * len(largest) // 4] or 1  # of the third quartile
    rows = math.ceil(len(gaps) / COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(10, 0.6 + 1.5 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (name, gap) in zip(grid.flat, gaps.items(), strict=False):
        for other in gaps.values():
            axes.plot(steps, other, color=GREY, linewidth=0.6)
        axes.plot(steps, gap, color="C0", linewidth=1.5)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_ylim(-limit, limit)
        far = " (off the scale)" if abs(gap[-1]) > limit else ""
        axes.set_title(f"{name}  {gap[-1]:+.2f}%{far}", loc="left", fontsize=9)
        bare(axes)
    for axes in grid.flat[len(gaps) :]:
        axes.set_visible(False)
    figure.supylabel(f"loss against {base_name} (%, mean of {width} steps)", fontsize=9)
    figure.supxlabel("step", fontsize=9)
    return saved(figure, output)


def label_ends(axes: Any, size: float = 9) -> None:
    """Writes the label of each curve next to its last point, shifted vertically to avoid overlap.

    Call it last, because it needs the final axis limits. Unlabelled curves (matplotlib's start with `_`) are skipped.
    """
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    figure = axes.figure
    axes.get_xlim(), axes.get_ylim()  # computes the limits, in case nothing has been drawn yet
    height = 1.25 * size * figure.dpi / 72
    ends = [(line, axes.transData.transform((line.get_xdata()[-1], line.get_ydata()[-1]))) for line in named]
    ends.sort(key=lambda end: end[1][1])
    places = spread([end[1] for _, end in ends], height)
    for (line, (_, at)), place in zip(ends, places, strict=True):
        axes.annotate(
            line.get_label(),
            (line.get_xdata()[-1], line.get_ydata()[-1]),
            xytext=(6, (place - at) * 72 / figure.dpi),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            fontsize=size,
        )


def spread(places: Sequence[float], distance: float) -> list[float]:
    """Increasing numbers at least `distance` apart, as close to `places` (increasing) as possible."""
    groups: list[tuple[float, int]] = []  # center and size
    for place in places:
        center, size = place, 1
        while groups and groups[-1][0] + groups[-1][1] * distance / 2 > center - size * distance / 2:
            other, count = groups.pop()
            center, size = (center * size + other * count) / (size + count), size + count
        groups.append((center, size))
    return [center + (number - (size - 1) / 2) * distance for center, size in groups for number in range(size)]


def bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    return plt


def saved(figure: Any, output: Path) -> Any:
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150, format="png")
    return figure
