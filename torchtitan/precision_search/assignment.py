"""Chooses one option for each layer: a multiple-choice knapsack."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BINS = 4096  # of the limit; rounding up to them wastes at most one a layer


class Option(NamedTuple):
    """
    Attributes:
        weight: counts towards the limit.
        value: to be minimized.
    """

    weight: float
    value: float


def choose(layers: Sequence[Sequence[Option]], limit: float) -> list[int] | None:
    """The index of an option for each layer, so that their values sum to the minimum and their weights to at most
    `limit`. None if even the lightest options exceed it.

    Dynamic programming over the layers and the weight used so far (Kellerer, Pferschy, Pisinger, Knapsack Problems,
    chapter 11), with weights rounded up to `limit / BINS`, so the limit holds, and the minimum is that of a slightly
    lower one.
    """
    lightest = [min(option.weight for option in options) for options in layers]
    left = limit - sum(lightest)
    if left < -1e-9 * abs(limit):
        return None
    best = np.zeros(BINS + 1)  # least sum of values, by weight used
    choices = []
    for options, least in zip(layers, lightest, strict=True):
        candidates = np.full((len(options), BINS + 1), np.inf)
        for index, option in enumerate(options):
            extra = option.weight - least
            if extra > max(left, 0.0) * (1 + 1e-9):
                continue
            bins = min(BINS, int(np.ceil(extra / left * BINS - 1e-6))) if extra > 0 else 0
            candidates[index, bins:] = best[: BINS + 1 - bins] + option.value
        choices.append(candidates.argmin(0))
        best = candidates.min(0)
    used, found = BINS, []
    for options, least, choice in zip(reversed(layers), reversed(lightest), reversed(choices), strict=True):
        index = int(choice[used])
        found.append(index)
        extra = options[index].weight - least
        used -= min(BINS, int(np.ceil(extra / left * BINS - 1e-6))) if extra > 0 else 0
    return found[::-1]
