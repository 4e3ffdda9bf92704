"""Tasks of lm-evaluation-harness (`lm_eval`), asked under every layout."""

import contextlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from numbers import Real
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from torchtitan.config.training import Evaluation
from torchtitan.errors import ConfigError, DataError, UserError, nearest, require_extra
from torchtitan.logging import Waiting
from torchtitan.parallel.object_collectives import from_rank_0
from torchtitan.tools.evaluation.requests import Encoder, Prompt, Request
from torchtitan.tools.evaluation.tasks import TaskMetrics

HARNESS = "lm_eval:"
MOST_TOKENS = 256  # limit for generated tokens where a task does not say; lm_eval's Hugging Face backend has the same
LM_EVAL_SEED = 1234  # lm_eval's default
RESAMPLES = 1000  # for standard errors that have no formula: lm_eval's 100,000 take minutes
GREEDY = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}  # what greedy generation can follow
UNSUITABLE = {"UNSAFE_CODE": "runs code that a model writes", "MULTIMODAL": "is not about text alone"}


class Harness:
    """All tasks of lm_eval that a run names; to lm_eval, also the model, whose answers are there already.

    Only rank 0 has the tasks. It makes their requests once and broadcasts them, so that all ranks ask the same, in the
    same order; from the answers it computes the metrics. lm_eval draws with its usual seeds, and the generators of the
    training are left as they were. Nothing is downloaded. `name_of` is how messages call a key. Raises a UserError on
    rank 0 if lm_eval is not installed, does not know a task, or lacks its data.
    """

    name = "lm_eval"
    rank, world_size = 0, 1  # so that lm_eval does not divide the requests

    def __init__(self, entries: Sequence[str], evaluation: Evaluation, name_of: Callable[[str], str]) -> None:
        self._key, self._limit = name_of("tasks"), evaluation.limit
        self._tasks: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
        self._instances: list[Any] = []
        with Waiting("lm_eval's tasks"), _seeds():
            for entry in entries if dist.get_rank() == 0 else ():
                self._load(entry, evaluation.num_fewshot)

    def _load(self, entry: str, num_fewshot: int | None) -> None:
        folder, _, name = entry.removeprefix(HARNESS).rpartition("/")
        require_extra(f"{self._key}: {entry}", "lm_eval", "lm_eval")
        manager = _manager(folder)
        if name not in manager.all_tasks:
            where = f"the folder {folder}" if folder else "lm_eval"
            include = f" --include_path {folder}" if folder else ""
            raise ConfigError(
                f"{self._key}: {where} has no task {name!r}{nearest(name, manager.all_tasks)}; "
                f"`lm_eval ls tasks{include}` lists them."
            )
        import datasets
        import huggingface_hub

        try:
            with (
                patch.object(datasets.config, "HF_HUB_OFFLINE", True),
                patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            ):
                loaded = manager.load([name])
            for section, known in self._tasks.items():
                if twice := next(iter(known.keys() & loaded[section].keys()), None):
                    raise ConfigError(f"{self._key}: {entry} and an entry before it both ask {twice}; remove one.")
                known |= loaded[section]
            for each, task in loaded["tasks"].items():
                if why := next((why for flag, why in UNSUITABLE.items() if getattr(task, flag, False)), None):
                    raise ConfigError(f"{self._key}: {HARNESS}{each} {why}, which is not possible here; remove it.")
                own = task.get_config("num_fewshot")
                task.set_config("num_fewshot", own or 0 if num_fewshot is None or own == 0 else num_fewshot)
                task.set_fewshot_seed(LM_EVAL_SEED)
                task.build_all_requests(limit=self._limit)
                task.build_all_requests = lambda **_: None  # `evaluate` would do it again, with other draws
                self._instances += task.instances
        except UserError:
            raise
        except ConnectionError as error:
            include = f"--include_path {folder} " if folder else ""
            raise DataError(
                f"{self._key}: {entry} needs a data set that is not in the local cache ({error}); to fetch it, where "
                f"there is a network: run `lm_eval --model dummy --limit 1 {include}--tasks {name}`."
            ) from None
        except Exception as error:  # the code in task files may raise anything
            raise DataError(f"{self._key}: lm_eval cannot load {entry}: {_sentence(error)}") from None

    def requests(self, encoder: Encoder) -> list[list[Request | Prompt]]:
        """The requests of each of lm_eval's instances. Collective."""

        def make() -> list[list[Request | Prompt]]:
            with Waiting("lm_eval's requests"):
                return [
                    TYPES[each.request_type][0](encoder, f"{self._key}: {HARNESS}{each.task_name}", *each.args)
                    for each in self._instances
                ]

        return from_rank_0(make)

    def metrics(self, scores: Sequence[Sequence[Any]]) -> dict[str, TaskMetrics]:
        """lm_eval's, with standard errors, of each task and group. Collective."""

        def compute() -> dict[str, TaskMetrics]:
            results = self._evaluate(scores, log_samples=False)["results"]
            # The key is the name, and the filter if there is one; lm_eval writes "N/A" for a missing standard error.
            return {
                f"{self.name}/{task}": {
                    name.removesuffix(",none"): float(value)
                    for name, value in values.items()
                    if "," in name and isinstance(value, Real)
                }
                for task, values in results.items()
            }

        return from_rank_0(compute)

    def details(self, scores: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        samples = self._evaluate(scores, log_samples=True)["samples"] if dist.get_rank() == 0 else {}
        return [
            {"task": f"{self.name}/{name}", **json.loads(json.dumps(sample, default=str))}
            for name, of_task in samples.items()
            for sample in of_task
        ]

    def _evaluate(self, scores: Sequence[Sequence[Any]], log_samples: bool) -> dict[str, Any]:
        """lm_eval's results. Raises a UserError if a task's own code fails."""
        from lm_eval import evaluate

        for instance, answers in zip(self._instances, scores, strict=True):
            instance.resps, instance.answer = [], TYPES[instance.request_type][1](answers)
        try:
            with (
                _seeds(),
                contextlib.redirect_stdout(sys.stderr),
                patch.dict(os.environ, DISABLE_MULTIPROC="1"),  # otherwise it would fork a process that trains
            ):
                options = {"limit": self._limit, "log_samples": log_samples, "bootstrap_iters": RESAMPLES}
                return dict(evaluate(self, self._tasks, **options))
        except Exception as error:
            raise UserError(f"{self._key}: lm_eval cannot compute its metrics: {_sentence(error)}") from None

    def _answer(self, instances: Sequence[Any]) -> list[object]:
        return [instance.answer for instance in instances]

    loglikelihood = loglikelihood_rolling = generate_until = _answer


def _prompt(encoder: Encoder, where: str, context: str, arguments: dict[str, Any]) -> list[Prompt]:
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    given: dict[str, Any] = {**normalize_gen_kwargs(arguments, MOST_TOKENS)}
    if given["do_sample"] or given.keys() - GREEDY or given["max_gen_toks"] >= encoder.longest:
        raise ConfigError(
            f"{where} generates {given['max_gen_toks']} tokens with {arguments}, but here a model writes only the most "
            f"likely tokens, and fewer than the {encoder.longest} that it sees at once; set other generation_kwargs in "
            f"a task file in a folder of your own ({HARNESS}FOLDER/TASK)."
        )
    stops = handle_stop_sequences(given["until"], encoder.tokenizer.piece(encoder.tokenizer.eos_id))
    return [encoder.prompt(context, given["max_gen_toks"], tuple(filter(None, stops)))]


# lm_eval's type of request -> what to ask, from an encoder, what messages begin with, and its arguments; and what
# lm_eval wants to know, from the model's answers.
TYPES: dict[str, tuple[Callable[..., Any], Callable[[Any], object]]] = {
    "loglikelihood": (
        lambda encoder, _, context, continuation: [encoder.continuation(context, continuation)],
        lambda answers: (answers[0].log_likelihood, answers[0].greedy),
    ),
    "loglikelihood_rolling": (
        lambda encoder, _, text: encoder.text(text),
        lambda answers: math.fsum(score.log_likelihood for score in answers),
    ),
    "generate_until": (_prompt, lambda answers: answers[0].text),
}


@cache
def _manager(folder: str) -> Any:
    """lm_eval's own task files, which take ten seconds to read, or the ones in a folder."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder or None, include_defaults=not folder)


@contextlib.contextmanager
def _seeds() -> Iterator[None]:
    """Context with lm_eval's seeds, which its tasks may draw with."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(LM_EVAL_SEED)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
