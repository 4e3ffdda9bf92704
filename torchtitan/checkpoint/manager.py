"""When to save and what to load; the writing itself is torch.distributed.checkpoint's."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.checkpoint.folder import (
    keep_latest,
    publish,
    read_train_state,
    remove_left_overs,
    saved_steps,
    step_folder,
    temporary_folder,
)
from torchtitan.checkpoint.state import load_optimizer_tensors, model_tensors, optimizer_tensors
from torchtitan.config.output import Checkpoint
from torchtitan.errors import CheckpointError
from torchtitan.logging import logger

TrainState = dict[str, Any]


class Writer(dcp.FileSystemWriter):
    """torch's writer, with errors that tell the cause."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save hides the error of a full disk behind one of its own
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None


class CheckpointManager:
    """Saves and loads the state of one run. All ranks make one, and call its methods at the same steps.

    Args:
        config: the section; with `enable_checkpoint` off, only `initial_load_path` is looked at.
        dump_folder: the run's.
        model, optimizer: whose tensors are saved, and loaded in place.
        identity: what makes this model itself (family, flavor, sizes), JSON-able. A checkpoint of another identity is
            refused.

    Raises:
        CheckpointError: the folder cannot be made.
    """

    def __init__(
        self,
        config: Checkpoint,
        dump_folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        identity: dict[str, Any],
    ) -> None:
        self.config = config
        self.folder = dump_folder / config.folder
        self.model = model
        self.optimizer = optimizer
        self.identity = identity
        self.failed_saves = 0
        self.last_save_failed = False
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None
        if config.enable_checkpoint:
            if config.async_mode != "disabled":  # the background thread must not meet the main thread's collectives
                self._group = dist.new_group(backend="gloo")
            if dist.get_rank() == 0:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise CheckpointError(
                        f"checkpoint.folder: {self.folder} cannot be made ({error.strerror})."
                    ) from None
                remove_left_overs(self.folder)
            dist.barrier()

    # Loading

    def load(self) -> TrainState | None:
        """Loads the checkpoint that the configuration asks for into model and optimizer.

        Returns:
            The state that `save` was given, where the run goes on from it; None for a new run (perhaps with loaded
            weights). Parts in `exclude_from_loading` are missing from it.

        Raises:
            CheckpointError: the step asked for is not there, or the checkpoint does not fit.
        """
        steps = saved_steps(self.folder) if self.config.enable_checkpoint else []
        wanted = self.config.load_step
        if wanted != -1 and wanted not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
            raise CheckpointError(
                f"checkpoint.load_step: no checkpoint of step {wanted} in {self.folder}; {there}. "
                "Use -1 for the newest."
            )
        if steps:
            path = step_folder(self.folder, steps[-1] if wanted == -1 else wanted)
            self._check_identity(path)
            return self._load(path, weights_only=False)
        if self.config.initial_load_path:
            weights_only = self.config.initial_load_model_weights_only
            state = self._load(Path(self.config.initial_load_path), weights_only)
            return None if weights_only else state
        return None

    def _load(self, path: Path, weights_only: bool) -> TrainState:
        state = read_train_state(path)
        if state["weights_only"] and not weights_only:
            raise CheckpointError(
                f"{path} holds the weights alone (checkpoint.last_save_model_weights_only), so the run cannot go on "
                "from it; choose an earlier one with --checkpoint.load_step, or start a new run with "
                f"--checkpoint.initial_load_path={path} and another --job.dump_folder."
            )
        excluded = set(self.config.exclude_from_loading)
        model = {} if "model" in excluded else model_tensors(self.model)
        without_optimizer = weights_only or "optimizer" in excluded or state["step"] == 0
        optimizer = {} if without_optimizer else optimizer_tensors(self.model, self.optimizer)
        tensors = {**model, **optimizer}
        try:
            if tensors:
                dcp.load(tensors, checkpoint_id=path)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} could not be loaded: {_first_line(error)}. Choose another with --checkpoint.load_step, "
                "or move the folder away."
            ) from error
        if optimizer:  # the model's tensors were read into place
            load_optimizer_tensors(self.model, self.optimizer, {key: tensors[key] for key in optimizer})
        left_out = f", without {', '.join(sorted(excluded))}" if excluded else ""
        logger.info(f"loaded {'the weights of ' if weights_only else ''}{path}{left_out}")
        return {
            key: value
            for key, value in state.items()
            if not (key == "dataloader" and "dataloader" in excluded)
            and not (key in ("step", "tokens_seen") and "train_state" in excluded)
        }

    def _check_identity(self, path: Path) -> None:
        theirs = read_train_state(path)["identity"]
        different = [key for key in self.identity if theirs.get(key) != self.identity[key]]
        if different:
            key = different[0]
            raise CheckpointError(
                f"{path} is a checkpoint of another model: its {key} is {theirs.get(key)}, this run's is "
                f"{self.identity[key]}. Use another --job.dump_folder, or the other model."
            )

    # Saving

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is saved after `step`."""
        if not self.config.enable_checkpoint:
            return False
        return last or step % self.config.interval == 0 or (step == 1 and self.config.enable_first_step_checkpoint)

    def save(self, step: int, state: Callable[[], TrainState], last: bool = False) -> None:
        """Saves after `step`. A save that fails (a full disk) is reported and counted; training goes on, and the
        checkpoints before it stay.

        Args:
            state: gives the JSON part; called on every rank, what rank 0 gets is written.
            last: of the run; then `last_save_model_weights_only` applies.
        """
        self.wait()
        self.last_save_failed = False
        weights_only = last and self.config.last_save_model_weights_only
        train_state = {"weights_only": weights_only, "identity": self.identity, **state()}
        # To ask a new optimizer for its state makes it count a step.
        tensors = self._tensors(weights_only) if step else model_tensors(self.model)
        temporary = temporary_folder(self.folder, step)
        asynchronous = self.config.async_mode != "disabled" and not last
        error: BaseException | None = None
        try:
            if asynchronous:
                self._pending = self._start(tensors, temporary, step, train_state)
                return
            dcp.save(tensors, storage_writer=Writer(temporary))
        except (CheckpointException, OSError, RuntimeError) as failure:
            error = failure
        self._finish(step, train_state, error)

    def wait(self) -> None:
        """Waits for a save in the background to be on disk."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()

    def _tensors(self, weights_only: bool) -> dict[str, torch.Tensor]:
        tensors = model_tensors(self.model)
        if not weights_only:
            return {**tensors, **optimizer_tensors(self.model, self.optimizer)}
        dtype = getattr(torch, self.config.export_dtype)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def _start(
        self, tensors: dict[str, torch.Tensor], temporary: Path, step: int, train_state: TrainState
    ) -> "Future[None]":
        """Copies the tensors and starts to write them. The future is done when the checkpoint is published."""
        stager = None
        if self.config.async_mode == "async_with_pinned_mem":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            stager = DefaultStager(StagingOptions(True, False, False, False))  # pinned host memory, copied at once
        started = dcp.async_save(
            tensors, storage_writer=Writer(temporary), process_group=self._group, async_stager=stager
        )
        written = started if isinstance(started, Future) else started.upload_completion
        published: Future[None] = Future()

        def finish(_: object) -> None:
            self._finish(step, train_state, written.exception())
            published.set_result(None)

        written.add_done_callback(finish)
        return published

    def _finish(self, step: int, train_state: TrainState, error: BaseException | None) -> None:
        """After the tensors are written, or not: on rank 0 the checkpoint is published."""
        try:
            if error is None and dist.get_rank() == 0:
                publish(self.folder, step, train_state)
                keep_latest(self.folder, self.config.keep_latest_k)
                logger.info(f"saved {step_folder(self.folder, step)}")
        except OSError as failure:
            error = failure
        if error is not None:
            self._failed(step, error)

    def _failed(self, step: int, error: BaseException) -> None:
        self.failed_saves += 1
        self.last_save_failed = True
        if dist.get_rank() == 0:
            shutil.rmtree(temporary_folder(self.folder, step), ignore_errors=True)
        logger.error(
            f"the checkpoint of step {step} could not be saved ({_first_line(error)}); {self.failed_saves} failed so "
            "far. Training goes on, and the checkpoints before it are as they were."
        )


def _first_line(error: BaseException) -> str:
    """The cause in a line. A CheckpointException holds one error for each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_first_line(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
