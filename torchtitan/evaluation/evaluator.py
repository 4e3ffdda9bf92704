"""Asks a model all tasks, and shows what it can do."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import printable
from torchtitan.evaluation.requests import Encoder, Score
from torchtitan.evaluation.scoring import Scorer
from torchtitan.evaluation.tasks import Metrics, Task
from torchtitan.logging import logger

COLUMNS = {
    "acc": "{:.1%}",
    "acc_norm": "{:.1%}",
    "chance": "{:.1%}",
    "bits_per_byte": "{:.4f}",
    "perplexity": "{:,.2f}",
    "document_perplexity": "{:,.2f}",
}


class Evaluator:
    """All tasks of a run or command, with different names. The text is encoded once, before anything is asked. Raises a
    DataError if the tokenizer makes nothing of a task's text."""

    def __init__(self, tasks: Sequence[Task], tokenizer: Tokenizer, scorer: Scorer) -> None:
        self.tasks = tasks
        self.scorer = scorer
        encoder = Encoder(tokenizer, scorer.longest)
        self._requests = [task.requests(encoder) for task in tasks]  # by task and example

    def scores(self, should_stop: Callable[[], bool] = lambda: False) -> list[list[list[Score]]] | None:
        """The scores of each task's examples' requests. None if the run is to stop before they are all there.
        Collective."""
        flat = [request for task in self._requests for example in task for request in example]
        found = self.scorer.score(flat, should_stop)
        if found is None:
            return None
        scores = iter(found)
        return [[list(itertools.islice(scores, len(example))) for example in task] for task in self._requests]

    def metrics(self, scores: Sequence[Sequence[Sequence[Score]]]) -> dict[str, Metrics]:
        """The metrics of each task: NaN, and a warning, where a likelihood is not finite."""
        results = {task.name: task.metrics(found) for task, found in zip(self.tasks, scores, strict=True)}
        for (name, metrics), found in zip(results.items(), scores, strict=True):
            flat = [score.is_finite for example in found for score in example]
            if not all(flat) and dist.get_rank() == 0:
                logger.warning(
                    f"{name}: {flat.count(False):,} of {len(flat):,} likelihoods are not finite (are weights NaN?), so "
                    "it has no metrics; they are null in files"
                )
            if not all(flat):
                metrics.update(dict.fromkeys(metrics.keys() - {"chance"}, math.nan))
        return results

    def details(self, scores: Sequence[Sequence[Sequence[Score]]]) -> list[dict[str, Any]]:
        """The result of each example of each task, as JSON."""
        return [
            {"task": task.name, **detail}
            for task, found in zip(self.tasks, scores, strict=True)
            for detail in task.details(found)
        ]


def _cell(name: str, value: float) -> str:
    return "not finite" if math.isnan(value) else COLUMNS[name].format(value)


def table(results: Mapping[str, Metrics]) -> str:
    """One line for each task; a column for each metric that any of them has."""
    columns = [name for name in COLUMNS if any(name in metrics for metrics in results.values())]
    rows = [["task", *columns]]
    for task, metrics in results.items():
        rows.append([printable(task), *(_cell(name, metrics[name]) if name in metrics else "" for name in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([task.ljust(widths[0]), *map(str.rjust, cells, widths[1:])] for task, *cells in rows)
    return "\n".join("  ".join(line) for line in lines)
