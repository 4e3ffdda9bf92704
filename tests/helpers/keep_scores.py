"""A user's module that keeps the scores of each evaluation in the working directory, for tests to compare."""

import json
import os
from typing import Any

import tiny  # noqa: F401  its models are there too

from torchtitan.tools.evaluation.evaluator import Evaluator

metrics = Evaluator.metrics


def keep(self: Evaluator, scores: Any) -> Any:
    with open(f"{os.environ['KEEP_SCORES']}/scores_of_rank_{os.environ.get('RANK', 0)}.json", "w") as file:
        json.dump(scores, file)
    return metrics(self, scores)


Evaluator.metrics = keep  # type: ignore[method-assign]
