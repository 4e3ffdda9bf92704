"""What a run reports at intervals, beside its steps: validation, samples, evaluation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torchtitan.data import Batch, ValidationLoader
from torchtitan.engine.train_step import evaluate
from torchtitan.errors import DataError
from torchtitan.evaluation.evaluator import Evaluator, table
from torchtitan.evaluation.samples import Sampler
from torchtitan.protocols import Hook


@dataclass
class Report(Hook):
    """A report every `freq` steps and after the last. A run that is to stop leaves those of the last step to the next
    start.

    Attributes:
        key: of what it records.
        make: makes it for a `Trainer`, unless the run is to stop first.
    """

    key: str
    freq: int
    make: Callable[[Any], None]

    def due(self, run: Any) -> bool:
        return bool(run.step % self.freq == 0 or run.step == run.config.training.steps)

    def after_step(self, run: Any) -> None:
        if self.due(run):
            run.begin()
            if not run.stop.agreed():
                with run.reporter.pause():
                    self.make(run)


def validate(loader: ValidationLoader, run: Any) -> None:
    loss = evaluate(run.engine, _batches(loader, run), run.agreed_to_stop)
    if loss is not None:
        run.reporter.validation(run.step, loss)
        run.call("after_validation", loss.item())


def _batches(loader: ValidationLoader, run: Any) -> Iterator[Batch | None]:
    """The batches, then None if this rank cannot read its data: all ranks then agree to save and stop."""
    try:
        yield from loader
    except DataError as error:
        run.data_error = str(error)
        yield None


def sample(sampler: Sampler, run: Any) -> None:
    samples = sampler.samples(run.agreed_to_stop)
    if samples is not None:
        run.reporter.samples(run.step, samples)
        run.folder.record_samples(run.step, samples)


def evaluate_tasks(evaluator: Evaluator, run: Any) -> None:
    start = perf_counter()
    scores = evaluator.scores(run.agreed_to_stop)
    if scores is not None:
        metrics = evaluator.metrics(scores)
        run.reporter.evaluation(run.step, metrics, table(metrics), perf_counter() - start)
