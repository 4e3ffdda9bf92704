"""Plots for the benchmarks: differences from a baseline, with curves labelled directly instead of in a legend."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GREY = "0.8"


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Over the last `width` values; over fewer at the start."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def percent_above(values: Sequence[float], base: Sequence[float], width: int) -> list[float]:
    """How far the moving mean of a loss is above the baseline's, in percent."""
    means, base_means = moving_mean(values, width), moving_mean(base, width)
    return [100 * (mean / base_mean - 1) for mean, base_mean in zip(means, base_means, strict=True)]


def mean_percent_above(runs: Sequence[Sequence[float]], bases: Sequence[Sequence[float]], width: int) -> list[float]:
    """`percent_above` of runs, each against the baseline with its seed; the mean at each step."""
    gaps = [percent_above(values, base, width) for values, base in zip(runs, bases, strict=False)]
    return [statistics.mean(at_step) for at_step in zip(*gaps, strict=True)]


def spread_of_runs(runs: Sequence[Sequence[float]], width: int) -> list[float]:
    """The standard deviation over runs of the moving mean of their losses, in percent of it, at each step."""
    means = [moving_mean(values, width) for values in runs]
    return [100 * statistics.stdev(at_step) / statistics.mean(at_step) for at_step in zip(*means, strict=True)]


def differences(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    bases: Sequence[Sequence[float]],
    output: Path,
    width: int,
    chance: Sequence[Sequence[float]] = (),
) -> Any:
    """How far losses are above a baseline's, in percent, mean over seeds: a panel for each family, a color and a label
    for each recipe, and in grey what chance changes (one standard deviation).

    An outlier would compress the other curves, so it is clipped; each label states the last value.

    Args:
        panels: by title, then by name, losses of each step: one run per seed.
        bases: the baseline's, with the same seeds.
        width: steps in the moving mean.
        chance: losses of runs of the baseline with other initial weights and the same data.
    """
    gaps = {
        title: {name: mean_percent_above(seeds, bases, width) for name, seeds in runs.items()}
        for title, runs in panels.items()
    }
    steps = range(1, len(bases[0]) + 1)
    grey = spread_of_runs(chance, width) if len(chance) > 1 else []
    largest = sorted(max(map(abs, gap[width:] or gap)) for runs in gaps.values() for gap in runs.values())
    limit = 1.3 * max(largest[3 * (len(largest) - 1) // 4], *grey[-width:], 1e-3)  # of the third quartile
    figure, grid = pyplot().subplots(
        len(gaps), 1, figsize=(9, 0.7 + 2.4 * len(gaps)), sharex=True, sharey=True, squeeze=False
    )
    figure.subplots_adjust(left=0.09, right=0.62, top=0.95, bottom=0.2 / len(gaps), hspace=0.25)
    for axes, (title, runs) in zip(grid[:, 0], gaps.items(), strict=True):
        if grey:
            axes.fill_between(steps, [-half_width for half_width in grey], grey, color=GREY, linewidth=0)
        axes.axhline(0, color="black", linewidth=0.6)
        for number, (name, gap) in enumerate(runs.items()):
            far = ", off the scale" if abs(gap[-1]) > limit else ""
            clipped = [max(-limit, min(limit, value)) for value in gap]
            axes.plot(steps, clipped, color=f"C{number}", linewidth=1.4, label=f"{name}  {gap[-1]:+.2f}%{far}")
        axes.set_xlim(0, len(steps))
        axes.set_ylim(-1.05 * limit, 1.05 * limit)
        axes.set_title(title, loc="left", fontsize=9)
        bare(axes)
        label_ends(axes, 8)
    figure.supylabel(f"loss against the baseline's (%, mean of {width} steps)", fontsize=9)
    grid[-1, 0].set_xlabel("step; grey: standard deviation over initial weights" if grey else "step", fontsize=9)
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
