"""What the instruments of a run need of it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torchtitan.checkpoint.base import Checkpoints
from torchtitan.config import JobConfig
from torchtitan.data import Batch, Loader
from torchtitan.engine.engine import Engine
from torchtitan.engine.stages import Stage
from torchtitan.run.hooks import Hooks
from torchtitan.run.run_folder import RunFolder

FurtherLosses = Callable[[Sequence[Batch], bool], dict[str, float]]
"""Called after each step with its micro-batches, and whether a report is due; returns what to report then."""


class MeasuredRun(Protocol):
    """What the instruments read of a run; they add themselves to its hooks."""

    engine: Engine
    loader: Loader
    folder: RunFolder
    stage: Stage
    checkpoints: Checkpoints
    hooks: Hooks
    step: int
    tokens_seen: int

    @property
    def config(self) -> JobConfig: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def schedule(self) -> list[tuple[int, str]]: ...
