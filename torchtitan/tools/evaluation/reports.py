"""What a run reports of tasks and sample texts, at intervals beside its steps."""

from contextlib import suppress
from time import perf_counter
from typing import Any

import torch.distributed as dist

from torchtitan.data import Tokenizer
from torchtitan.engine.engine import Engine
from torchtitan.errors import UserError
from torchtitan.logging import logger
from torchtitan.parallel.object_collectives import raise_on_all_ranks
from torchtitan.run.reports import Report
from torchtitan.tools.evaluation.evaluator import Evaluator, results_table
from torchtitan.tools.evaluation.find_tasks import find_tasks
from torchtitan.tools.evaluation.samples import Sampler
from torchtitan.tools.evaluation.scoring import Stopped, scorer_of_run


def build_reports(engine: Engine, tokenizer: Tokenizer) -> list[Report]:
    """The reports that the configuration of a stage asks for. Collective. Raises a UserError if a task or a prompt
    cannot be used."""
    config, scorer, reports = engine.config, scorer_of_run(engine), list[Report]()
    validation, evaluation = config.validation, config.evaluation
    tasks = raise_on_all_ranks(lambda: find_tasks(evaluation, validation, config.training))
    if validation.enabled and validation.sample_prompts:
        sampler = Sampler(validation.sample_prompts, tokenizer, scorer)
        reports.append(Report("samples", validation.freq, sample, sampler))
    if tasks:
        reports.append(Report("evaluation_seconds", evaluation.freq, ask, Evaluator(tasks, tokenizer, scorer)))
    return reports


def sample(sampler: Sampler, run: Any) -> None:
    with suppress(Stopped):
        samples = sampler.samples(run.data.agreed_to_stop)
        run.reporter.samples(run.step, samples)
        run.folder.record_samples(run.step, samples)


def ask(evaluator: Evaluator, run: Any) -> None:
    start = perf_counter()
    try:
        scores = evaluator.scores(run.data.agreed_to_stop)
    except Stopped:
        return
    try:
        metrics = evaluator.metrics(scores)
    except UserError as error:  # a fault in another's task must not end a run of weeks
        if dist.get_rank() == 0:
            logger.warning(f"step {run.step} | no evaluation: {error}")
    else:
        run.reporter.evaluation(run.step, metrics, results_table(metrics), perf_counter() - start)
