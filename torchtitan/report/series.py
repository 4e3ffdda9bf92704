"""Curves: as read, down-sampled so that no spike is lost, and several seeds on one grid."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = 6  # significant; half as many bytes as all of them, and far more than a screen shows

Floats = NDArray[np.float64]


@dataclass
class Series:
    """One number over the steps of a run; NaN where it was not finite."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    @property
    def arrays(self) -> tuple[NDArray[np.int64], Floats]:
        return np.asarray(self.steps, dtype=np.int64), np.asarray(self.values, dtype=np.float64)

    @property
    def finite(self) -> Floats:
        values = self.arrays[1]
        return values[np.isfinite(values)]

    @property
    def last(self) -> float | None:
        found = self.finite
        return float(found[-1]) if len(found) else None


def downsample(series: Series, points: int) -> dict[str, Any]:
    """At most about `points` points of a curve: the least and the largest of each stretch, in their order.

    Returns:
        x, y: the points; None in y where a value was not finite.
        mean_x, mean_y: the mean of each stretch, from which smooth curves are made; missing where x, y are all points.
    """
    steps, values = series.arrays
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
    """Several curves at the steps that all of them have: x, and a row of values for each.

    With more than `points` steps the mean of each stretch stands for it. None where they have no step in common.
    """
    steps = members[0].arrays[0]
    for member in members[1:]:
        steps = np.intersect1d(steps, member.arrays[0])
    if not len(steps):
        return None
    # The last value of a step counts where a step is there twice.
    found = [dict(zip(*map(np.ndarray.tolist, member.arrays), strict=True)) for member in members]
    values = [np.array([of[step] for step in steps.tolist()]) for of in found]
    if len(steps) > points:
        values = [_mean(_rows(of, points)) for of in values]
        steps = np.rint(_mean(_rows(steps.astype(np.float64), points))).astype(int)
    return {"x": steps.tolist(), "rows": [rounded(of) for of in values]}


def rounded(values: Floats) -> list[float | None]:
    """To DIGITS significant digits; None for what is not finite."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def _rows(values: Floats, count: int) -> Floats:
    """Stretches of equal length, at most `count` of them; the last is filled up with NaN."""
    width = -(-len(values) // count)
    padded = np.full(-(-len(values) // width) * width, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, width)


def _mean(rows: Floats) -> Floats:
    """Of the finite values in each row; NaN where there is none."""
    finite = np.isfinite(rows)
    counts = finite.sum(axis=1)
    return np.where(counts, np.where(finite, rows, 0).sum(axis=1) / np.maximum(counts, 1), np.nan)
