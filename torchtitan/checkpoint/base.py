"""What a run asks of its checkpoints. `manager.py` answers where it saves or loads some."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan.files import is_remote
from torchtitan.logging import logger
from torchtitan.parallel.object_collectives import from_rank_0
from torchtitan.protocols import Decoder
from torchtitan.registry import load

if TYPE_CHECKING:
    from torchtitan.checkpoint.train_state import TrainState


class Checkpoints:
    """The checkpoints of a run that neither saves nor loads any, nor has several stages.

    Attributes:
        folder: `checkpoint.folder`.
        failed_saves: how many saves of this start have failed so far.
        loaded_weights: whether `load` has filled the model.
        step_on_disk: of the checkpoint last loaded or saved.
        former_configuration: of the start that saved the checkpoint from which this run resumes; empty for a new run.
    """

    folder: Path
    failed_saves = 0
    last_save_failed = False
    loaded_weights = False
    step_on_disk: int | None = None
    former_configuration: Mapping[str, Any]

    def __init__(self, folder: Path) -> None:
        self.folder, self.former_configuration = folder, {}

    def load(self) -> "TrainState | None":
        """Warns of checkpoints of earlier runs, which are ignored. Collective."""
        steps = from_rank_0(self._steps_of_others)
        if steps and dist.get_rank() == 0:
            logger.warning(
                f"{self.folder} holds checkpoints up to step {steps[-1]}, which are ignored because "
                "checkpoint.enable_checkpoint is off"
            )
        return None

    def _steps_of_others(self) -> list[int]:
        if is_remote(self.folder):
            return []
        try:
            self.folder.stat()
        except FileNotFoundError:
            return []
        except OSError:
            pass  # `run_steps` has a sentence for it.
        steps: list[int] = load("torchtitan.checkpoint.folder:run_steps")(self.folder)
        return steps

    def take_state(self) -> dict[str, torch.Tensor]:
        """Tensors that the next stage goes on with; here there is no next stage."""
        return {}

    def hand_on(
        self, state: Mapping[str, torch.Tensor], model: Decoder, optimizer: torch.optim.Optimizer, seq_len: int
    ) -> None:
        """Fills the next stage's model and optimizer with what `take_state` returned."""

    def begin_average(self, step: int) -> None:
        """Lets a moving average that the stage after `step` has and none before had begin from the weights there."""

    def due(self, step: int, last: bool, tokens_seen: int = 0) -> bool:
        return False

    def save(self, step: int, state: "Callable[[], TrainState]", last: bool = False, keep: bool = False) -> None:
        """Saves after `step`, when a save is due."""

    def save_before_stop(self, step: int, state: "Callable[[], TrainState]") -> bool:
        """Saves after `step` unless that is done, and waits. Returns whether the step is on disk."""
        return False

    def export(self, step: int) -> None:
        """Exports the weights after the last step for Hugging Face, if configured and not done yet."""

    def newest_on_disk(self) -> int | None:
        """The step from which the same command would resume, as far as this process knows; None if there is none."""
        return None

    def wait(self) -> None:
        """Waits until a background save is on disk."""
