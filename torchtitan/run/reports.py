"""What a run reports at intervals, beside its steps; `tools/evaluation/reports.py` has tasks and samples."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.data import Batch
from torchtitan.engine.forward import evaluate
from torchtitan.errors import DataError
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
            with run.reporter.pause():
                self.make(self.source, run)


def validate(loader: Iterable[Batch], run: Any) -> None:
    def batches() -> Iterator[Batch | None]:
        try:
            yield from loader
        except DataError as error:  # all ranks agree to save and stop
            run.data.error = str(error)
            yield None

    loss = evaluate(run.engine, batches(), run.data.agreed_to_stop)
    if loss is not None:
        run.reporter.validation(run.step, loss)
        run.hooks.call(run, "after_validation", loss.item())
