"""The law of a ladder: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al., arXiv 2203.15556, approach 3).

Fitted as corrected by Besiroglu et al. (arXiv 2404.10102): the Huber loss of residuals in log L, summed and not
averaged, so that L-BFGS does not stop too early; from a grid of starts; with intervals by bootstrap.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.errors import ConfigError
from torchtitan.tools.report.series import Floats

DELTA = 1e-3  # parameter of the Huber loss; both papers have this value
BOOTSTRAPS = 500
CONFIDENCE = 0.95
SAME = 1.05  # numbers of tokens are whole steps: what is closer than this was meant to be equal
BEST_STARTS = 10  # points of the grid that are refined
SHARES, POWERS, FLOORS = (0.1, 0.3, 0.6), (0.1, 0.3, 0.6, 1.0), (0.05, 0.3, 0.7)  # the grid; shares of the mean loss


@dataclass(frozen=True)
class FinishedRun:
    """One finished run: parameters N, tokens D, and its loss in any unit."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Interval:
    """An estimate, and where it lies with a probability of CONFIDENCE."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted law."""

    formula: str  # "E + A / N^alpha + B / D^beta", or only its first two terms
    constants: dict[str, Interval]  # E, A, alpha, and B, beta if fitted
    error: float  # root mean square of the residuals in log L, corrected for the number of constants
    _centers: Floats
    _theta: Floats
    _bootstraps: Floats
    _residuals: Floats

    def loss(self, parameters: float, tokens: float) -> float:
        """The law's value."""
        return float(np.exp(_log_loss(self._theta, self._place(parameters, tokens))[0]))

    def predict(self, parameters: float, tokens: float) -> Interval:
        """The loss of a run, with an interval for what it will measure: the law's uncertainty and the runs' scatter."""
        place = self._place(parameters, tokens)
        losses = np.array([_log_loss(theta, place)[0] for theta in self._bootstraps])
        draws = np.random.default_rng(1).choice(self._residuals, len(losses))
        return _interval(self.loss(parameters, tokens), np.exp(losses + draws))

    def _place(self, parameters: float, tokens: float) -> Floats:
        return (np.log([[parameters, tokens]])[:, : len(self._centers)] - self._centers).astype(np.float64)


def varies_tokens(points: Sequence[tuple[float, float]]) -> bool:
    """Whether tokens vary independently of parameters in these points (N, D), so that both terms can be fitted. Raises
    a ConfigError if none can."""
    sizes, tokens = (_distinct(column) for column in zip(*points, strict=True))
    along = _distinct([d for _, d in points]) == 1 or _distinct([d / n for n, d in points]) == 1
    constants = 3 if along else 5
    count = len(set(points))
    if count <= constants or sizes < 3 or (not along and tokens < 3):
        needs = "3 sizes" if along else "3 sizes, 3 numbers of tokens"
        raise ConfigError(
            f"A ladder of {count} runs, {sizes} sizes and {tokens} numbers of tokens cannot be fitted: {constants} "
            f"constants need {needs} and {constants + 1} runs; add --sizes"
            + ("." if along else ", --tokens or --tokens-per-parameter.")
        )
    return not along


def fit(rows: Sequence[FinishedRun], bootstraps: int = BOOTSTRAPS) -> Fit:
    """Fits the law.

    If all runs have the same D, or the same D / N, the terms of N and D cannot be told apart: then E + A / N^alpha is
    fitted, which holds for this D or D / N only. The bootstrap draws residuals, not runs: a ladder is so small that
    drawing runs would often leave too few sizes.

    Raises:
        ConfigError: too few different runs.
    """
    from scipy.stats import norm as normal
    from scipy.stats import t as student

    both = varies_tokens([(row.parameters, row.tokens) for row in rows])
    logs = np.log([[row.parameters, row.tokens][: 2 if both else 1] for row in rows])
    centers = logs.mean(0)
    places, losses = logs - centers, np.log([row.loss for row in rows])
    theta = _best(places, losses, _starts(both, float(losses.mean())))
    fitted = _log_loss(theta, places)
    freedom = len(rows) - len(theta)
    residuals = (losses - fitted) * np.sqrt(len(rows) / freedom)
    error = float(np.sqrt(np.mean(residuals**2)))
    # The scatter is itself estimated from few runs, so intervals are wider by Student's factor.
    quantile = (1 + CONFIDENCE) / 2
    residuals *= student.ppf(quantile, freedom) / normal.ppf(quantile)
    random = np.random.default_rng(0)
    drawn = [fitted + random.choice(residuals, len(rows)) for _ in range(bootstraps)]
    bootstrapped = np.array([_best(places, losses, theta[None]) for losses in drawn])
    names = ("E", "A", "alpha", "B", "beta")
    table = np.array([_constants(theta, centers) for theta in bootstrapped])
    constants = {
        name: _interval(value, table[:, number])
        for number, (name, value) in enumerate(zip(names, _constants(theta, centers), strict=False))
    }
    formula = "E + A / N^alpha" + (" + B / D^beta" if both else "")
    return Fit(formula, constants, error, centers, theta, bootstrapped, residuals)


def _log_loss(theta: Floats, places: Floats) -> Floats:
    """log L of each run: the log-sum-exp of its terms. theta: log E, then for each term its log at the center and its
    power. places: (runs, terms), log N and log D around their means, which keeps the constants of a term
    independent."""
    terms = theta[1::2] - theta[2::2] * places
    total: Floats = np.logaddexp.reduce(np.column_stack([np.full(len(places), theta[0]), terms]), axis=1)
    return total


def _objective(theta: Floats, places: Floats, losses: Floats) -> tuple[float, Floats]:
    """The sum of Huber losses over DELTA^2 and its gradient."""
    predicted = _log_loss(theta, places)
    scaled = (predicted - losses) / DELTA
    size = np.abs(scaled)
    value = float(np.sum(np.where(size <= 1, scaled**2 / 2, size - 0.5)))
    slope = np.clip(scaled, -1, 1) / DELTA
    shares = np.exp(theta[1::2] - theta[2::2] * places - predicted[:, None])  # share of each term in the loss
    gradient = np.empty_like(theta)
    gradient[0] = slope @ np.exp(theta[0] - predicted)
    gradient[1::2] = slope @ shares
    gradient[2::2] = -(slope @ (shares * places))
    return value, gradient


def _starts(both: bool, mean: float) -> Floats:
    term = (np.log(SHARES) + mean, POWERS)
    grid = itertools.product(np.log(FLOORS) + mean, *(term * (2 if both else 1)))
    return np.array(list(grid), dtype=np.float64)


def _best(places: Floats, losses: Floats, starts: Floats) -> Floats:
    """The minimum with the lowest objective that L-BFGS finds from the best of these starts."""
    from scipy.optimize import minimize

    if len(starts) > BEST_STARTS:
        starts = starts[np.argsort([_objective(start, places, losses)[0] for start in starts])[:BEST_STARTS]]
    level = float(losses.mean())
    # A term below 1e-4 of the loss is none; powers are positive, for more parameters or data do not harm.
    bounds = [(level - 9, level + 3), *[(level - 9, level + 3), (0.0, 5.0)] * (starts.shape[1] // 2)]
    minima: list[Any] = [
        minimize(
            _objective, start, (places, losses), "L-BFGS-B", jac=True, bounds=bounds,
            options={"maxiter": 2000, "ftol": 1e-12, "gtol": 1e-8},
        )
        for start in starts
    ]  # fmt: skip
    return np.asarray(min(minima, key=lambda result: result.fun).x)


def _constants(theta: Floats, centers: Floats) -> list[float]:
    """E, A, alpha, B, beta in the units of the rows."""
    terms = zip(theta[1::2], theta[2::2], centers, strict=True)
    return [float(np.exp(theta[0])), *(x for log, power, mid in terms for x in (np.exp(log + power * mid), power))]


def _interval(value: float, samples: Floats) -> Interval:
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(value), float(low), float(high))


def _distinct(values: Sequence[float]) -> int:
    ordered = sorted(values)
    return 1 + sum(high > SAME * low for low, high in itertools.pairwise(ordered))
