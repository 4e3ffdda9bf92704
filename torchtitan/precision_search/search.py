"""The search: which recipe each layer gets, so that the step is fastest within a loss budget."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.converters.numerics import Operands
from torchtitan.plan.step_model import Rates
from torchtitan.precision_search.assignment import Option, choose
from torchtitan.precision_search.candidates import Candidate, Cell, layer_seconds, measure

Assignment = dict[str, int | None]
"""For each layer the index of its candidate; None: bf16."""


@dataclass(frozen=True)
class Table:
    """What is known of each layer in each recipe.

    Attributes:
        candidates: the recipes.
        cells: for each layer one per candidate; None if it cannot convert the layer.
        bf16_seconds: of each layer, modelled.
    """

    candidates: Sequence[Candidate]
    cells: dict[str, list[Cell | None]]
    bf16_seconds: dict[str, float]

    @classmethod
    def of(
        cls, candidates: Sequence[Candidate], operands: Mapping[str, Operands], rates: Rates, momentum: float
    ) -> "Table":
        """From operands of each layer in training.

        Args:
            momentum: decay rate of the optimizer's first moment.
        """
        cells = measure(candidates, operands, rates, momentum)
        decisions = candidates[0].decisions
        return cls(candidates, cells, {fqn: layer_seconds(decisions[fqn], "", None, rates) for fqn in cells})

    def noise(self, assignment: Assignment) -> float:
        found = (self.cells[fqn][index] for fqn, index in assignment.items() if index is not None)
        return sum(cell.noise for cell in found if cell is not None)

    def seconds(self, assignment: Assignment) -> float:
        """Of all linear layers in a micro-batch."""
        total = 0.0
        for fqn, index in assignment.items():
            cell = None if index is None else self.cells[fqn][index]
            total += self.bf16_seconds[fqn] if cell is None else cell.seconds
        return total

    def throughout(self, index: int, excluded: Sequence[str] = ()) -> Assignment:
        """One recipe for all layers that it converts, but for the excluded ones."""
        return {
            fqn: index if row[index] is not None and fqn not in excluded else None for fqn, row in self.cells.items()
        }

    def gains(self) -> bool:
        """Whether any layer is faster in some recipe."""
        return any(self._pays(fqn, cell) for fqn, row in self.cells.items() for cell in row)

    def _pays(self, fqn: str, cell: Cell | None) -> bool:
        return cell is not None and cell.seconds < self.bf16_seconds[fqn]

    def calibrating(self) -> list[int]:
        """For each converter by which some layer gains, its recipe that is fastest throughout; of equally fast ones the
        one with the least noise, since the model is for small errors."""
        found: dict[str, list[int]] = {}
        for index, candidate in enumerate(self.candidates):
            if any(self._pays(fqn, row[index]) for fqn, row in self.cells.items()):
                found.setdefault(candidate.converter.name, []).append(index)

        def order(index: int) -> tuple[float, float]:
            everywhere = self.throughout(index)
            return self.seconds(everywhere), self.noise(everywhere)

        return [min(of_converter, key=order) for of_converter in found.values()]

    def to_json(self) -> dict[str, Any]:
        """By layer and recipe: noise, seconds (null: never), and errors by GEMM; null if it cannot be converted."""
        names = [candidate.name for candidate in self.candidates]
        return {
            fqn: {
                "bf16": {"noise": 0.0, "seconds": self.bf16_seconds[fqn]},
                **{name: cell and _cell_to_json(cell) for name, cell in zip(names, row, strict=True)},
            }
            for fqn, row in self.cells.items()
        }

    def fastest(self, noise: float) -> Assignment:
        """The fastest assignment with at most this noise; of equally fast ones that with the least."""
        return self.quietest(self.seconds(self._best(noise, by_noise=True)))

    def quietest(self, seconds: float) -> Assignment:
        """The assignment with the least noise that takes at most these seconds, which some assignment must."""
        return self._best(seconds, by_noise=False)

    def _best(self, limit: float, by_noise: bool) -> Assignment:
        """Tries each combination of recipes with at most one of each converter, as a configuration can have."""
        by_converter: dict[str, list[int | None]] = {}
        for index, candidate in enumerate(self.candidates):
            by_converter.setdefault(candidate.converter.name, [None]).append(index)
        found: list[tuple[float, float, Assignment]] = []
        for combination in itertools.product(*by_converter.values()):
            allowed = [index for index in combination if index is not None]
            assignment = self._choose(allowed, limit, by_noise)
            if assignment is not None:
                noise, seconds = self.noise(assignment), self.seconds(assignment)
                found.append((*((seconds, noise) if by_noise else (noise, seconds)), assignment))
        return min(found, key=lambda one: one[:2])[2]

    def _choose(self, allowed: Sequence[int], limit: float, by_noise: bool) -> Assignment | None:
        indices: list[list[int | None]] = []
        layers = []
        for fqn, row in self.cells.items():
            options: list[tuple[int | None, float, float]] = [(None, 0.0, self.bf16_seconds[fqn])]
            for index in allowed:
                cell = row[index]
                if cell is not None and self._pays(fqn, cell):
                    options.append((index, cell.noise, cell.seconds))
            indices.append([index for index, _, _ in options])
            layers.append([Option(*(both if by_noise else both[::-1])) for _, *both in options])
        chosen = choose(layers, limit)
        if chosen is None:
            return None
        return {fqn: mine[index] for fqn, mine, index in zip(self.cells, indices, chosen, strict=True)}


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    seconds = cell.seconds if math.isfinite(cell.seconds) else None
    return {"noise": cell.noise, "seconds": seconds, "errors": cell.errors}


@dataclass(frozen=True)
class LossModel:
    """Predicts the loss above bf16's, in percent, from noise: `percent_per_noise` times the noise.

    Attributes:
        spread: of bf16's loss over initial weights, in percent (standard deviation): what one run can resolve.
    """

    percent_per_noise: float
    spread: float

    @classmethod
    def fit(cls, noises: Sequence[float], percents: Sequence[float], spread: float) -> "LossModel":
        """From the noise of runs in low precision and their measured loss above bf16's.

        Least squares through 0, plus the standard error if each run's loss is off by the spread: a run that ends within
        it says only that low precision costs no more.
        """
        squares = sum(noise**2 for noise in noises)
        if squares == 0:
            return cls(math.inf, spread)
        slope = sum(noise * percent for noise, percent in zip(noises, percents, strict=True)) / squares
        return cls(max(slope, 0.0) + spread / math.sqrt(squares), spread)

    def percent(self, noise: float) -> float:
        return self.percent_per_noise * noise if noise else 0.0

    def noise(self, percent: float) -> float:
        """The noise that costs this much."""
        return percent / self.percent_per_noise if self.percent_per_noise else math.inf
