"""What a run reports at intervals, beside its steps: validation, samples, evaluation."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch.distributed as dist

from torchtitan.data import Batch, ValidationLoader
from torchtitan.engine.forward import evaluate
from torchtitan.errors import DataError, UserError
from torchtitan.evaluation.evaluator import Evaluator, table
from torchtitan.evaluation.samples import Sampler
from torchtitan.evaluation.scoring import Stopped
from torchtitan.logging import logger
from torchtitan.protocols import Hook


@dataclass
class Report(Hook):
    """What `make(part, run)` records under `key` every `freq` steps and after the last, unless the run is to stop
    first. The next start records what the last step lacks."""

    key: str
    freq: int
    make: Callable[[Any, Any], None]
    source: Any

    def due(self, run: Any) -> bool:
        return bool(run.step % self.freq == 0 or run.step == run.config.training.steps)

    def after_step(self, run: Any) -> None:
        if self.due(run):
            self.record(run)

    def record(self, run: Any) -> None:
        run.begin()
        if not run.stop.agreed():
            with run.reporter.pause(), suppress(Stopped):
                self.make(self.source, run)


def validate(loader: ValidationLoader, run: Any) -> None:
    def batches() -> Iterator[Batch | None]:
        try:
            yield from loader
        except DataError as error:  # all ranks agree to save and stop
            run.data_error = str(error)
            yield None

    loss = evaluate(run.engine, batches(), run.agreed_to_stop)
    if loss is not None:
        run.reporter.validation(run.step, loss)
        run.call("after_validation", loss.item())


def sample(sampler: Sampler, run: Any) -> None:
    samples = sampler.samples(run.agreed_to_stop)
    run.reporter.samples(run.step, samples)
    run.folder.record_samples(run.step, samples)


def ask(evaluator: Evaluator, run: Any) -> None:
    start = perf_counter()
    scores = evaluator.scores(run.agreed_to_stop)
    try:
        metrics = evaluator.metrics(scores)
    except UserError as error:  # a fault in another's task must not end a run of weeks
        if dist.get_rank() == 0:
            logger.warning(f"step {run.step} | no evaluation: {error}")
    else:
        run.reporter.evaluation(run.step, metrics, table(metrics), perf_counter() - start)
