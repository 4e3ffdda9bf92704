"""The training loop, over the parts built by `build_trainer`."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchtitan.checkpoint.base import Checkpoints
from torchtitan.config import JobConfig
from torchtitan.data import Batch, Loader
from torchtitan.data.datasets import DataOfRun
from torchtitan.engine.converter_hooks import checked_step, steps_to_check
from torchtitan.engine.engine import Engine, train_step
from torchtitan.engine.stages import Stage, stage_of
from torchtitan.errors import CheckpointError, DataError, TrainingError
from torchtitan.launcher.signals import Stop
from torchtitan.logging import logger
from torchtitan.metrics import MetricsReporter
from torchtitan.models.init import init_weights
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.parallel.object_collectives import all_gather_object
from torchtitan.parallel.process_group import leave_process_group, set_timeout
from torchtitan.registry import load
from torchtitan.run.data_readiness import DATA_ENDED, DataReadiness
from torchtitan.run.hooks import Hooks, factor_on_learning_rate
from torchtitan.run.instruments import Instruments, metrics_of_experts, over_ranks_with_epochs, packing_metrics
from torchtitan.run.reports import Report
from torchtitan.run.run_folder import RunFolder

if TYPE_CHECKING:
    from torchtitan.checkpoint.train_state import TrainState


class BuildsStages(Protocol):
    """`StageBuilder` of `build_trainer.py`, which imports this module."""

    @property
    def data(self) -> DataOfRun: ...
    def with_rows(self, rows: int) -> "BuildsStages": ...
    def build(self, stage: Stage) -> tuple[Engine, Loader, list[Report]]: ...
    def reads_as(self, config: JobConfig, state: Mapping[str, Any]) -> bool: ...


@dataclasses.dataclass
class Trainer:
    """One run, built by `build_trainer`. Use it as a context manager: leaving it closes what was opened.

    Attributes:
        stages: every stage of the run; `builder` builds what one trains with, the first one's before the trainer.
        stage: the current one; `config` is its configuration.
        step: number of the last optimizer step, performed or skipped.
        first_step: the step of the checkpoint from which the run goes on that is not its own; else 0.
        data: waits for batches, and until they are verified.
    """

    stages: Sequence[Stage]
    builder: BuildsStages
    engine: Engine
    loader: Loader
    checkpoints: Checkpoints
    folder: RunFolder
    stop: Stop
    hooks: Hooks
    step: int = 0
    first_step: int = 0
    tokens_seen: int = 0
    instruments: Instruments = dataclasses.field(default_factory=Instruments)
    stage: Stage = dataclasses.field(init=False)
    guard: UpdateGuard = dataclasses.field(init=False)
    data: DataReadiness = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.stage, self.data = self.stages[0], DataReadiness(self.stop)
        self.guard = UpdateGuard(self.config.training, self.folder.record_skipped_update)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loader.close()
        if error is None:  # otherwise other ranks may be gone: do not wait for them
            self.checkpoints.wait()
            leave_process_group()
            self.folder.write_report()

    def train(self) -> None:
        """Trains up to `training.steps`, or until a signal or the end of the data stops the run."""
        steps, left = self.config.training.steps, self._left_over()
        if self.config.checkpoint.create_seed_checkpoint:
            return self._save_seed_checkpoint()
        if self.step >= steps and not left:
            self._require_an_update()
            logger.info(f"this run has already finished its {steps} steps; raise training.steps to continue")
            return self.checkpoints.export(self.step)
        with self._tracked():
            self._train_stage(left)
            while self.step < steps and not self.stop.agreed_on:
                before = self.stage.number
                load("torchtitan.run.transitions:enter_next_stage")(self)
                self._train_stage(self._left_over() if self.stage.number > before else ())  # else another batch size
            self._end()

    def _tracked(self) -> contextlib.AbstractContextManager[Any]:
        if self.folder.config.metrics.trackers:
            tracked: contextlib.AbstractContextManager[Any] = load("torchtitan.run.tracking:tracked")(self)
            return tracked
        return contextlib.nullcontext()

    def _train_stage(self, left: Sequence[Report] = ()) -> None:
        """Trains up to the last step of the stage, or until the run is to stop. `left`: reports that are missing."""
        checked_steps = steps_to_check(self.engine, self.step + 1)
        with self.instruments.of_stage(self, checked_steps) as collect_garbage:
            self.hooks.call(self, "on_start")
            for report in left:
                report.record(self)
            while self.step < min(self.stage.last_step, self.config.training.steps) and self._data_are_ready():
                self.begin()
                self.stop.progress.begins()
                with record_function("data"):
                    microbatches = self.loader.next()
                self.step += 1
                collect_garbage(self.step)
                with checked_step(self.engine, len(microbatches), self.step in checked_steps):
                    self.train_step(microbatches)
                self.stop.progress.ends()
                self.hooks.call(self, "after_step")
                self._save_if_due()
                self._has_compiled()

    def _left_over(self) -> list[Report]:
        """The reports that are missing before the next step: all with `evaluation.at_start`; or else those after the
        last step, if the start that trained it was stopped."""
        at_start = self.config.evaluation.at_start
        if not at_start and self.step != self.config.training.steps:
            return []
        recorded = self.folder.recorded(self.step) if self.step else ()  # files about step 0 are from another start
        reports = (hook for hook in self.hooks.own if isinstance(hook, Report))
        return [report for report in reports if (at_start or report.due(self)) and report.key not in recorded]

    def begin(self) -> None:
        """From the first call on, files of the run are written."""
        if self.folder.has_begun:
            return
        config = self.config
        # Ranks that train on the same rows leave it to the first to record the sample ids.
        recording = config.training.record_sample_ids and self.engine.meshes.is_first_of_dp_rank
        self.folder.begin(self.step, sample_ids=recording)
        self.folder.record_event(
            self.step,
            "start",
            device=f"{self.engine.device.type} ({self.engine.device.name})",
            processes=dist.get_world_size(),
            layout=f"{self.engine.meshes.dims}",
            model=f"{config.model.name} {config.model.flavor}, {self.engine.full.num_parameters:,} parameters",
            torch=torch.__version__,
            **({"changed": self.folder.changed} if self.folder.changed else {}),
        )

    def _has_compiled(self) -> None:
        """After the first step of a stage, which may have compiled: the next ones get the shorter timeout."""
        if self.step == self.reporter.start_step + 1:
            if self.engine.fused_gemms is not None:
                self.engine.fused_gemms.report()
            set_timeout(self.config.comm.train_timeout_seconds)

    def train_step(self, microbatches: Sequence[Batch]) -> None:
        """Runs one training step and reports it."""
        lr = self.stage.learning_rate(self.step)
        lr *= factor_on_learning_rate(self.hooks.users, self.stop.group)
        loss, grad_norm = train_step(self.engine, microbatches, lr, self.guard.should_skip, self.step)
        self.tokens_seen += self.tokens_per_step
        if len(self.stages) > 1 and self.step == self.stage.first_step:  # a resume from the step before replaces it
            self.folder.record_event(self.step, "stage", name=self.stage.title, batch_size=self.global_batch_size)
        self.folder.record_sample_ids(self.step, [row for batch in microbatches for row in batch.sample_ids or []])
        self._report_step(microbatches, loss, grad_norm, lr)

    def _report_step(
        self, microbatches: Sequence[Batch], loss: torch.Tensor, grad_norm: torch.Tensor, lr: float
    ) -> None:
        """Reports the step that has just run, from what `train_step` of the engine returned."""
        reporter = self.reporter
        experts = metrics_of_experts(self.engine) if reporter.due(self.step) else None
        further = dict[str, float]()
        for losses in self.instruments.further_losses:
            further |= losses(microbatches, reporter.due(self.step))
        tokens, of_data = 1, dict[str, float]()
        if reporter.due(self.step):
            tokens, packing = packing_metrics(self, microbatches)
            loss, seconds, epochs = over_ranks_with_epochs(self, loss, reporter.own_seconds(self.step))
            of_data = {**packing, **reporter.epochs(self.step, epochs), **reporter.slowest_rank(self.step, seconds)}
        reporter.step(
            self.step,
            loss=lambda: loss / tokens,
            grad_norm=grad_norm,
            lr=lr,
            skipped_updates=self.guard.read,
            failed_saves=self.checkpoints.failed_saves,
            **({"stage": self.stage.number} if len(self.stages) > 1 else {}),
            **of_data,
            **further,
            **({} if experts is None else experts.summary),
        )
        if experts is not None:
            reporter.expert_load(self.step, experts.load)

    @property
    def _ends_stage(self) -> bool:
        """Whether an entry of [[stage]] ends with this step. Its checkpoint stays."""
        return self.config.checkpoint.enable_checkpoint and self.stage.at_end and self.step == self.stage.last_step

    @property
    def config(self) -> JobConfig:
        return self.stage.config

    @property
    def reporter(self) -> MetricsReporter:
        return self.instruments.reporter

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.config.training.sequences_per_step(self.engine.meshes.dims.dp)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.config.training.seq_len

    def _save_if_due(self) -> None:
        last = self.step == self.config.training.steps
        if self.checkpoints.due(self.step, last, self.tokens_seen) or self._ends_stage:
            with self.reporter.pause():
                if self.data.verified():
                    self.folder.restore_config()
                    self.checkpoints.save(self.step, self._state, last, keep=self._ends_stage)

    def _save_seed_checkpoint(self) -> None:
        if self.checkpoints.step_on_disk is not None:
            raise CheckpointError(
                f"checkpoint.create_seed_checkpoint: {self.checkpoints.folder} already holds checkpoints; choose "
                "another --job.dump_folder."
            )
        self.folder.write_config()
        self.hooks.users.clear()  # they are not started
        self.checkpoints.save(0, self._state)
        self.checkpoints.wait()
        if self.checkpoints.last_save_failed:
            raise CheckpointError("checkpoint.create_seed_checkpoint: the checkpoint could not be saved; see above.")

    def _state(self) -> "TrainState":
        state: TrainState = load("torchtitan.run.resume:state_of")(self)
        return state

    def load_checkpoint(self) -> None:
        """Resumes from the checkpoint selected by `checkpoint`, or initializes the weights."""
        state = self._load_weights()
        if state is not None:  # nothing here refers to the engine: a resume may build another one in its memory
            load("torchtitan.run.resume:resume")(self, state)

    def _load_weights(self) -> "TrainState | None":
        engine, seed = self.engine, self.config.training.seed
        if self.config.training.mtp_layers:  # a published folder lacks these layers
            load("torchtitan.models.mtp:init_mtp")(engine.model, seed, engine.full.init_factor)
        state = self.checkpoints.load()
        if not self.checkpoints.loaded_weights:
            init_weights(engine.model, engine.model.init_std, seed, engine.full.init_factor)
        return state

    def positions(self) -> dict[str, Any]:
        """Positions in the data of all ranks. Collective."""
        return self.loader.merge_states(all_gather_object(self.loader.state_dict()))

    @property
    def schedule(self) -> list[tuple[int, str]]:
        return [(stage.last_step, stage.title) for stage in self.stages]

    @property
    def next_learning_rate(self) -> float:
        return stage_of(self.step + 1, self.stages).learning_rate(self.step + 1)

    def _data_are_ready(self) -> bool:
        """Whether all ranks have the next batches; else the run is to save and stop. Collective."""
        return self.data.on_all_ranks(self._wait_for_data, lambda: self.loader.retrying)

    def _wait_for_data(self, cancelled: Callable[[], bool]) -> bool:
        with self.reporter.waiting_for_data():
            return self.loader.wait(cancelled)

    def _end(self) -> None:
        """Saves or exports what is left."""
        if self.step < self.config.training.steps or self.stop.agreed_on or not self.data.verified():
            return self._end_early()
        self._require_an_update()
        self.checkpoints.wait()
        if self.checkpoints.last_save_failed:
            raise CheckpointError(
                "training finished, but its last checkpoint could not be saved (see above). Fix the cause, such as a "
                f"full disk, and run the same command again. {self.stop.on_disk}"
            )
        self.checkpoints.export(self.step)
        self.folder.restore_config()
        logger.info(f"training finished after step {self.step}; its output is in {self.folder.path}")

    def _require_an_update(self) -> None:
        """Raises a TrainingError if every update of the run was skipped: its weights are those that it began with."""
        self.guard.read()
        if 0 < self.step - self.first_step <= self.guard.in_a_row:
            steps = f"steps {self.first_step + 1} to {self.step}"
            raise TrainingError(
                f"the run has failed: every update ({steps}) was skipped, so that its weights are those that it began "
                "with; skipped_updates.jsonl in the dump folder says why. Correct the cause, such as the data, the "
                "weights that it began with or optimizer.lr, and start again with another --job.dump_folder."
            )

    def _save_before_stop(self) -> tuple[bool, str]:
        """Saves, unless something that was read is damaged, or not yet verified. Returns whether this step is on disk,
        and why not if that is why. Raises a DataError with what is damaged. Collective."""
        self.checkpoints.wait()
        saves = self.config.checkpoint.enable_checkpoint and self.step not in (0, self.checkpoints.step_on_disk)
        if saves and (unverified := self.data.unverified_in_time(self.step)):
            return False, unverified
        return self.checkpoints.save_before_stop(self.step, self._state), ""

    def _end_early(self) -> None:
        """Saves, and tells the user how to resume."""
        self.guard.read()
        errors = all_gather_object(self.data.error)
        on_disk, unverified = self._save_before_stop()
        if self.stop.agreed_on == DATA_ENDED:
            if on_disk:
                logger.info(f"the data cannot be read beyond step {self.step}; a checkpoint of this step is saved")
            raise DataError(next(error for error in errors if error is not None))
        stopped = f"stopped by {self.stop.name}"
        if on_disk:
            left = " with what is left to evaluate" if self.step == self.config.training.steps else ""
            logger.info(
                f"{stopped} after step {self.step}; its checkpoint is saved, and the same command resumes from it{left}"
            )
        elif unverified:
            logger.warning(f"{stopped} after step {self.step}, which is not saved: {unverified}. {self.stop.on_disk}")
        elif self.checkpoints.last_save_failed:
            raise CheckpointError(
                f"{stopped} after step {self.step}; its checkpoint could not be saved (see above). Fix the cause, such "
                f"as a full disk, and run the same command again. {self.stop.on_disk}"
            )
        elif self.stop.has_trained:
            logger.info(
                f"{stopped} after step {self.step}; nothing is saved because checkpoint.enable_checkpoint is off"
            )
        else:
            logger.info(f"{stopped} before the first step finished; run the same command to start again")
        self.stop.mark()
