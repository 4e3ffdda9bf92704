"""Runs all tasks on a model and reports its scores."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.errors import aligned, printable
from torchtitan.logging import logger
from torchtitan.tools.evaluation.requests import Encoder, Prompt, Request
from torchtitan.tools.evaluation.samples import continuations
from torchtitan.tools.evaluation.scoring import Scorer, ShouldStop
from torchtitan.tools.evaluation.tasks import Task, TaskMetrics

COLUMNS = {
    **dict.fromkeys(("acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "chance"), "{:.1%}"),
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
        self._tokenizer = tokenizer
        encoder = Encoder(tokenizer, scorer.longest)
        self._requests = [task.requests(encoder) for task in tasks]  # one list per task

    def scores(self, should_stop: ShouldStop = lambda: False) -> list[list[list[Any]]]:
        """The answers to each task's examples' requests: a Score, or the Continuation of a Prompt. Collective."""
        flat = [request for task in self._requests for example in task for request in example]
        requests = [request for request in flat if isinstance(request, Request)]
        prompts = [prompt for prompt in flat if isinstance(prompt, Prompt)]
        scores = self.scorer.score(requests, should_stop) if requests else []
        written = continuations(prompts, self._tokenizer, self.scorer, should_stop)
        answers: dict[type, Iterator[Any]] = {Request: iter(scores), Prompt: iter(written)}
        return [[[next(answers[type(request)]) for request in example] for example in task] for task in self._requests]

    def metrics(self, scores: Sequence[Sequence[Sequence[Any]]]) -> dict[str, TaskMetrics]:
        """The metrics of each task: NaN, and a warning, where an answer is not finite. Collective. Raises a UserError
        if a task's own code fails."""
        results: dict[str, TaskMetrics] = {}
        for task, of_task in zip(self.tasks, scores, strict=True):
            named = task.metrics(of_task)
            results |= named
            flat = [score.is_finite for example in of_task for score in example]
            if not all(flat) and dist.get_rank() == 0:
                logger.warning(
                    f"{task.name}: {flat.count(False):,} of {len(flat):,} likelihoods are not finite (are weights "
                    "NaN?), so it has no metrics; they are null in files"
                )
            if not all(flat):
                for metrics in named.values():
                    metrics.update(dict.fromkeys(metrics.keys() - {"chance"}, math.nan))
        return results

    def details(self, scores: Sequence[Sequence[Sequence[Any]]]) -> list[dict[str, Any]]:
        """The result of each example of each task, as JSON."""
        return [
            {"task": task.name, **detail}
            for task, of_task in zip(self.tasks, scores, strict=True)
            for detail in task.details(of_task)
        ]


def _cell(name: str, value: float) -> str:
    return "not finite" if math.isnan(value) else COLUMNS.get(name, "{:.4f}").format(value)


def results_table(results: Mapping[str, TaskMetrics]) -> str:
    """One line for each task; a column for each metric that any of them has."""
    names = dict.fromkeys(name for metrics in results.values() for name in metrics)
    columns = [*(name for name in COLUMNS if name in names), *(name for name in names if name not in COLUMNS)]
    rows = [["task", *columns]]
    for task, metrics in results.items():
        rows.append([printable(task), *(_cell(name, metrics[name]) if name in metrics else "" for name in columns)])
    return aligned(rows, left=1)
