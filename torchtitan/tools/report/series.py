"""Curves: as read, down-sampled without losing spikes, and several seeds on one grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = 6  # significant; half the bytes of full precision, and far more than a screen shows

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One number over increasing steps of a run; NaN where it was not finite."""

    steps: NDArray[np.int64]
    values: Floats

    @property
    def finite(self) -> Floats:
        return self.values[np.isfinite(self.values)]


def downsample(series: Series, points: int) -> dict[str, Any]:
    """About `points` points of a curve at most: x and y of the minimum and maximum of each interval, in their order,
    with None in y for values that are not finite. For smoothed curves, the means too, unless x, y are all points."""
    steps, values = series.steps, series.values
    if len(steps) <= points:
        return {"x": steps.tolist(), "y": rounded(values)}
    rows = _rows(values, points // 2)
    some = np.isfinite(rows).any(axis=1)
    least = np.where(np.isfinite(rows), rows, np.inf).argmin(axis=1)
    largest = np.where(np.isfinite(rows), rows, -np.inf).argmax(axis=1)
    starts = np.arange(len(rows)) * rows.shape[1]
    kept = np.unique(np.concatenate([starts + least, starts + largest, [0, len(steps) - 1]]))
    centers = _mean(_rows(steps.astype(np.float64), points // 2))
    return {
        "x": steps[kept].tolist(),
        "y": rounded(values[kept]),
        "mean_x": np.rint(centers[some]).astype(int).tolist(),
        "mean_y": rounded(_mean(rows[some])),
    }


def on_one_grid(members: Sequence[Series], points: int) -> dict[str, Any] | None:
    """Several curves at their common steps: x, and a row of values for each. With more than `points` steps, intervals
    are averaged. None if there is no common step."""
    steps = members[0].steps
    for member in members[1:]:
        steps = np.intersect1d(steps, member.steps)
    if not len(steps):
        return None
    values = [member.values[np.searchsorted(member.steps, steps)] for member in members]
    if len(steps) > points:
        values = [_mean(_rows(of, points)) for of in values]
        steps = np.rint(_mean(_rows(steps.astype(np.float64), points))).astype(int)
    return {"x": steps.tolist(), "rows": [rounded(of) for of in values]}


def rounded(values: Floats) -> list[float | None]:
    """To DIGITS significant digits; None if not finite."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def _rows(values: Floats, count: int) -> Floats:
    """At most `count` intervals of equal length; the last is padded with NaN."""
    width = -(-len(values) // count)
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, width)


def _mean(rows: Floats) -> Floats:
    """The mean of the finite values in each row; NaN if there is none."""
    finite = np.isfinite(rows)
    counts = finite.sum(axis=1)
    return np.where(counts, np.where(finite, rows, 0).sum(axis=1) / np.maximum(counts, 1), np.nan)
