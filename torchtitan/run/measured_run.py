"""What the instruments of a run need of it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torchtitan.checkpoint.base import Checkpoints
from torchtitan.config import JobConfig
from torchtitan.data import Batch, Loader
from torchtitan.engine.engine import Engine
from torchtitan.engine.stages import Stage
from torchtitan.metrics import MetricsReporter
from torchtitan.metrics.writers import Writer
from torchtitan.protocols import Hook
from torchtitan.run.run_folder import RunFolder

FurtherLosses = Callable[[Sequence[Batch], bool], dict[str, float]]
"""Called after each step with its micro-batches, and whether a report is due; returns what to report then."""


class MeasuredRun(Protocol):
    """What the instruments read of a run; they set its reporter and losses, and add themselves to its hooks."""

    engine: Engine
    loader: Loader
    folder: RunFolder
    stage: Stage
    checkpoints: Checkpoints
    trackers: Sequence[Writer]
    reporter: MetricsReporter
    further_losses: Sequence[FurtherLosses]
    own_hooks: list[Hook]
    step: int
    tokens_seen: int

    @property
    def config(self) -> JobConfig: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def schedule(self) -> list[tuple[int, str]]: ...
