"""The training loop, over the parts built by `build_trainer`."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchtitan.checkpoint import CheckpointManager
from torchtitan.checkpoint.train_state import check_kind, refuse_wrong_values
from torchtitan.config import JobConfig
from torchtitan.config.training import LRScheduler
from torchtitan.converters.conversion_report import schedule_line
from torchtitan.data import Batch, Loader, ValidationLoader
from torchtitan.engine.converter_hooks import checked_step, converter_state, load_converter_state, steps_to_check
from torchtitan.engine.engine import Engine
from torchtitan.engine.train_step import evaluate, sum_over_ranks, train_step
from torchtitan.errors import CheckpointError, DataError
from torchtitan.evaluation.evaluator import Evaluator, table
from torchtitan.evaluation.samples import Sampler
from torchtitan.launcher.signals import Stop
from torchtitan.logging import logger
from torchtitan.metrics import MetricsReporter, Profiler, find_peak
from torchtitan.models.expert_balance import ExpertMetrics, expert_metrics
from torchtitan.models.init import init_weights
from torchtitan.optim.schedule import lr_factor
from torchtitan.optim.skip_step import UpdateGuard
from torchtitan.parallel.process_group import set_timeout
from torchtitan.protocols import IGNORE_INDEX
from torchtitan.report.compare import differing, flat, shown
from torchtitan.run.garbage_collection import garbage_collection
from torchtitan.run.openmp_threads import limit_spinning
from torchtitan.run.run_folder import RunFolder
from torchtitan.run.startup_log import log_settings

DATA_ENDED = 64  # passed to `Stop` in place of a signal number; larger than any of them
SECONDS_TOGETHER = 1.0  # between agreements to wait for a rank that reads its data again


@dataclasses.dataclass
class Trainer:
    """One run, built by `build_trainer`. Use it as a context manager: leaving it closes what was opened.

    Attributes:
        dtype_reason: why GEMMs run in their dtype; "" if the configuration says so.
        step: number of the last optimizer step, performed or skipped.
        data_error: why this rank can no longer read its data.
        changed: keys that had another value when the checkpoint was saved, and [old, new], as text.
        has_begun: whether files of the run are written.
        compiles: whether the next step may compile, for which collectives have a longer timeout.
    """

    config: JobConfig
    engine: Engine
    loader: Loader
    validation_loader: ValidationLoader | None
    checkpoints: CheckpointManager
    guard: UpdateGuard
    folder: RunFolder
    stop: Stop
    closing: contextlib.ExitStack
    global_batch_size: int
    dtype_reason: str
    evaluator: Evaluator | None = None
    sampler: Sampler | None = None
    step: int = 0
    tokens_seen: int = 0
    data_error: str | None = None
    changed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    has_begun: bool = False
    compiles: bool = True

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.closing.close()
            self.folder.write_report()
        else:  # other ranks may be gone: do not wait for them
            self.loader.close()

    def train(self) -> None:
        """Trains up to `training.steps`, or until a signal or the end of the data stops the run."""
        steps, left = self.config.training.steps, self._left_over()
        if self.config.checkpoint.create_seed_checkpoint:
            return self._save_seed_checkpoint()
        if self.step >= steps and not left:
            logger.info(f"this run has already finished its {steps} steps; raise training.steps to continue")
            return self.checkpoints.export(self.step)
        checked_steps = steps_to_check(self.engine, self.step + 1)
        with self._instruments(checked_steps) as (profiler, reporter, collect_garbage):
            complete = self._report(left, reporter)
            while self.step < steps and not self._should_stop(reporter):
                self._begin()
                self.stop.progress.begins()
                with record_function("data"):
                    microbatches = self.loader.next()
                self.step += 1
                collect_garbage(self.step)
                self._enter_phase(self.step)
                with checked_step(self.engine, len(microbatches), self.step in checked_steps):
                    self.train_step(microbatches, reporter)
                self.stop.progress.ends()
                profiler.step()
                reporter.measure_peak()
                complete = self._report(self._due(), reporter)
                self._save_if_due(reporter)
                self._has_compiled()
        self._end(complete)

    def _left_over(self) -> list[str]:
        """The reports after the last step that are missing because the start that trained it was stopped."""
        if self.step != self.config.training.steps:
            return []
        recorded = self.folder.recorded(self.step)
        return [key for key in self._due() if key not in recorded]

    def _begin(self) -> None:
        """From the first call on, files of the run are written."""
        if self.has_begun:
            return
        self.has_begun = True
        config = self.config
        # Of the ranks that train on the same rows, the first records the sample ids.
        recording = config.training.record_sample_ids and self.engine.meshes.is_first_of_dp_rank
        self.folder.begin(self.step, sample_ids=recording)
        self.folder.record_event(
            self.step,
            "start",
            device=f"{self.engine.device.type} ({self.engine.device.name})",
            processes=dist.get_world_size(),
            layout=f"{self.engine.meshes.dims}",
            model=f"{config.model.name} {config.model.flavor}, {self.engine.num_parameters:,} parameters",
            torch=torch.__version__,
            **({"changed": self.changed} if self.changed else {}),
        )

    def _has_compiled(self) -> None:
        """After a step that may have compiled: the next ones get the shorter timeout."""
        if self.compiles:
            self.compiles = False
            if self.engine.fused_gemms is not None:
                self.engine.fused_gemms.check()
            set_timeout(self.config.comm.train_timeout_seconds)

    def train_step(self, microbatches: Sequence[Batch], reporter: MetricsReporter) -> None:
        """Runs one training step and reports it."""
        config = self.config
        lr = config.optimizer.lr * lr_factor(self.step, config.training.steps, config.lr_scheduler)
        loss, grad_norm = train_step(self.engine, microbatches, lr, self.guard.should_skip, self.step)
        self.tokens_seen += self.tokens_per_step
        self.folder.record_sample_ids(self.step, [row for batch in microbatches for row in batch.sample_ids or []])
        phases = self.engine.phases
        experts = self._expert_metrics() if reporter.due(self.step) else None
        tokens, packing = self._packing_metrics(microbatches) if reporter.due(self.step) else (0, {})
        reporter.step(
            self.step,
            loss=lambda: sum_over_ranks(self.engine, loss) / tokens,
            grad_norm=grad_norm,
            lr=lr,
            skipped_updates=self.guard.read,
            failed_saves=self.checkpoints.failed_saves,
            **({"precision_phase": phases.current + 1} if phases is not None else {}),
            **packing,
            **({} if experts is None else experts.summary),
        )
        if experts is not None:
            reporter.expert_load(self.step, experts.load)

    def _record_busy(self, threads_waiting: float) -> None:
        self.folder.record_event(self.step, "busy", threads_waiting=round(threads_waiting, 1))

    def _expert_metrics(self) -> ExpertMetrics | None:
        moe = self.engine.model.args.moe
        return moe and expert_metrics(self.engine.expert_statistics, moe.top_k, self.engine.meshes.mesh)

    def _packing_metrics(self, microbatches: Sequence[Batch]) -> tuple[int, dict[str, float]]:
        """The number of tokens with a loss in all ranks' micro-batches of this step, and the shares of padding and of
        cut documents since the run began. Collective."""
        packed = self.loader.packed
        if not packed:
            return self.tokens_per_step, {}
        labels = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in microbatches)
        total = torch.tensor([labels, *packed.values()], device=self.engine.device.torch_device)
        dist.all_reduce(total)
        labels, documents, cut, padding, tokens = total.tolist()
        shares = {"padding_share": padding / tokens, "cut_share": cut / max(documents, 1)}
        return labels // (dist.get_world_size() // self.engine.meshes.dims.dp), shares

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.config.training.seq_len

    def _enter_phase(self, step: int) -> None:
        """Enters the precision phase of `step`."""
        phases, compiled = self.engine.phases, self.config.training.compile
        if phases is None or not phases.enter(step, self.engine.model, compiled):
            return
        self.engine = dataclasses.replace(self.engine, converters=phases.converters)
        if self.has_begun:
            logger.info(f"step {step}: precision changes to {phases.schedule[phases.current][1]}")
            if compiled:
                self.compiles = True
                set_timeout(self.config.comm.init_timeout_seconds)

    @property
    def _reports(self) -> dict[str, tuple[object, int, Callable[[MetricsReporter], bool]]]:
        """By a key of what it records: None where it is off, its interval in steps, and what does it, which returns
        False if the run is to stop first."""
        validation, evaluation = self.config.validation, self.config.evaluation
        return {
            "validation_loss": (self.validation_loader, validation.freq, self._validate),
            "samples": (self.sampler, validation.freq, self._sample),
            "evaluation_seconds": (self.evaluator, evaluation.freq, self._evaluate),
        }

    def _due(self) -> list[str]:
        """The reports that are due after this step."""
        last = self.step == self.config.training.steps
        there = {key: freq for key, (part, freq, _) in self._reports.items() if part is not None}
        return [key for key, freq in there.items() if last or self.step % freq == 0]

    def _report(self, due: Sequence[str], reporter: MetricsReporter) -> bool:
        """Whether all are done; False if the run is to stop first. Collective."""
        for key in due:
            self._begin()
            if self.stop.agreed():
                return False
            with reporter.pause():
                if not self._reports[key][2](reporter):
                    return False
        return True

    def _validate(self, reporter: MetricsReporter) -> bool:
        loss = evaluate(self.engine, self._validation_batches(), self._agreed_to_stop)
        if loss is not None:
            reporter.validation(self.step, loss)
        return loss is not None

    def _sample(self, reporter: MetricsReporter) -> bool:
        assert self.sampler is not None
        samples = self.sampler.samples(self._agreed_to_stop)
        if samples is not None:
            reporter.samples(self.step, samples)
            self.folder.record_samples(self.step, samples)
        return samples is not None

    def _evaluate(self, reporter: MetricsReporter) -> bool:
        assert self.evaluator is not None
        start = perf_counter()
        scores = self.evaluator.scores(self._agreed_to_stop)
        if scores is not None:
            metrics = self.evaluator.metrics(scores)
            reporter.evaluation(self.step, metrics, table(metrics), perf_counter() - start)
        return scores is not None

    def _validation_batches(self) -> Iterator[Batch | None]:
        """The batches, then None if this rank cannot read its data: all ranks then agree to save and stop."""
        try:
            yield from self.validation_loader or ()
        except DataError as error:
            self.data_error = str(error)
            yield None

    def _save_if_due(self, reporter: MetricsReporter) -> None:
        last = self.step == self.config.training.steps
        if self.checkpoints.due(self.step, last):
            with reporter.pause():
                self.folder.restore_config()
                self.checkpoints.save(self.step, self._state, last)

    def _save_seed_checkpoint(self) -> None:
        if self.checkpoints.step_on_disk is not None:
            raise CheckpointError(
                f"checkpoint.create_seed_checkpoint: {self.checkpoints.folder} already holds checkpoints; choose "
                "another --job.dump_folder."
            )
        self.folder.write_config()
        self.checkpoints.save(0, self._state)
        self.checkpoints.wait()
        if self.checkpoints.last_save_failed:
            raise CheckpointError("checkpoint.create_seed_checkpoint: the checkpoint could not be saved; see above.")

    def _state(self) -> dict[str, Any]:
        """The JSON part of a checkpoint. Complete on rank 0."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.loader.state_dict())
        phases = self.engine.phases
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "guard": self.guard.state_dict(),
            "dataloader": self.loader.merge_states(states),
            **({"precision_schedule": phases.schedule} if phases is not None else {}),
            "converters": converter_state(self.engine),
            "loss_scale": self.engine.loss_scale,
        }

    def load_checkpoint(self) -> None:
        """Resumes from the checkpoint selected by `checkpoint`, or initializes the weights."""
        state = self.checkpoints.load(self._before_loading)
        if not self.checkpoints.loaded_weights:
            engine = self.engine
            init_weights(engine.model, engine.model.init_std, self.config.training.seed, engine.init_factor)
        if state is None:
            return
        self.step = state.get("step", 0)
        self.tokens_seen = state.get("tokens_seen", 0)
        former = flat(self.checkpoints.former_configuration)
        current = flat(json.loads(json.dumps(dataclasses.asdict(self.config), default=str)))
        for key in differing([former, current]):
            if key in former and key in current:  # otherwise of another version
                old, new = self.changed[key] = [shown(former[key]), shown(current[key])]
                logger.info(f"{key} = {new}; it was {old} when the checkpoint was saved")
        with refuse_wrong_values():
            if (theirs := state.get("learning_rate", self._former_learning_rate())) is not None:
                self._compare_learning_rate(theirs)
            if "guard" in state:
                self.guard.load_state_dict(state["guard"])
            if "dataloader" in state:
                check_kind(state["dataloader"], {"positions": self.loader.state_dict()["positions"]}, "dataloader")
                self.loader.load_state_dict(state["dataloader"])
            scale = state.get("loss_scale", self.engine.loss_scale)  # checkpoints of earlier versions lack it
            load_converter_state(self.engine, state.get("converters", {}), scale)

    def _former_learning_rate(self) -> float | None:
        """Of the next step, if the start that saved the checkpoint had gone on; None if it does not say."""
        former, step = self.checkpoints.former_configuration, self.step + 1
        with contextlib.suppress(KeyError, TypeError):  # of an earlier version
            schedule, steps = LRScheduler(**former["lr_scheduler"]), former["training"]["steps"]
            return former["optimizer"]["lr"] * lr_factor(step, steps, schedule) if step <= steps else None
        return None

    def _compare_learning_rate(self, theirs: float) -> None:
        """With that of the next step in the run of the checkpoint."""
        config, step = self.config, self.step + 1
        if step > config.training.steps:
            return
        ours = config.optimizer.lr * lr_factor(step, config.training.steps, config.lr_scheduler)
        if not math.isclose(theirs, ours, rel_tol=1e-5) and dist.get_rank() == 0:
            logger.warning(
                f"the learning rate of step {step} is {ours:.6g}; it would have been {theirs:.6g} in the run of the "
                "checkpoint. To keep its schedule, compare optimizer.lr, training.steps and [lr_scheduler]"
            )

    def _before_loading(self, state: Mapping[str, Any]) -> None:
        """Enters the checkpoint's precision phase; warns if its schedule was different."""
        phases = self.engine.phases
        if state["step"] > 0:
            self._enter_phase(state["step"])
        with refuse_wrong_values():
            saved = [(last, str(name)) for last, name in state.get("precision_schedule", [])]
        schedule = phases.schedule if phases is not None else []
        if saved and saved != schedule:
            logger.warning(
                f"the checkpoint of step {state['step']} had the precision schedule {schedule_line(saved)}; this "
                f"run continues with {schedule_line(schedule) if schedule else 'none'} (fractions such as until = 0.9 "
                "refer to training.steps)"
            )

    def _should_stop(self, reporter: MetricsReporter) -> bool:
        """Waits for the next batches or a signal. Then all ranks agree whether to save and stop, because any of them
        got a signal or cannot read its data. While one reads again after an error, which may take longer than a
        collective may, all agree to wait. Collective."""
        while True:
            ready, retry = False, perf_counter() + SECONDS_TOGETHER
            try:
                with reporter.waiting_for_data():
                    ready = self.loader.wait(partial(self._waits_no_longer, retry))
            except DataError as error:
                self.data_error = str(error)
            if self._agreed_to_stop(ready):
                return True
            if not self.stop.unready:
                return False

    def _waits_no_longer(self, retry: float) -> bool:
        return self.stop.requested > 0 or (self.loader.retrying and perf_counter() > retry)

    def _agreed_to_stop(self, ready: bool = True) -> bool:
        return self.stop.agreed(DATA_ENDED if self.data_error else 0, ready)

    def _end(self, complete: bool) -> None:
        """Saves or exports what is left. `complete`: all reports of the last step are made."""
        if self.step < self.config.training.steps or not complete:
            return self._end_early()
        self.checkpoints.wait()
        if self.checkpoints.last_save_failed:
            raise CheckpointError(
                "training finished, but its last checkpoint could not be saved (see above). Fix the cause, such as a "
                f"full disk, and run the same command again. {self.stop.on_disk}"
            )
        self.checkpoints.export(self.step)
        self.folder.restore_config()
        logger.info(f"training finished after step {self.step}; its output is in {self.folder.path}")

    def _end_early(self) -> None:
        """Saves, and tells the user how to resume."""
        self.guard.read()
        if self.stop.agreed_on == DATA_ENDED:
            errors: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, self.data_error)
            if self.checkpoints.save_before_stop(self.step, self._state):
                logger.info(f"the data cannot be read beyond step {self.step}; a checkpoint of this step is saved")
            raise DataError(next(error for error in errors if error is not None))
        stopped = f"stopped by {self.stop.name}"
        if self.checkpoints.save_before_stop(self.step, self._state):
            left = " with what is left to evaluate" if self.step == self.config.training.steps else ""
            logger.info(
                f"{stopped} after step {self.step}; its checkpoint is saved, and the same command resumes from it{left}"
            )
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

    @contextlib.contextmanager
    def _instruments(
        self, checked_steps: set[int]
    ) -> Iterator[tuple[Profiler, MetricsReporter, Callable[[int], None]]]:
        """What the loop needs beside the run's parts; the last collects garbage."""
        config, device = self.config, self.engine.device
        log_settings(
            self.engine,
            dtype_reason=self.dtype_reason,
            data=self.loader.description,
            global_batch_size=self.global_batch_size,
            first_step=self.step + 1,
            tokens_seen=self.tokens_seen,
            checkpoints=self.checkpoints.folder,
        )
        profiler = Profiler(
            config.profiling,
            self.folder.path,
            rank=dist.get_rank(),
            device_type=device.type,
            start_step=self.step,
            busy=checked_steps,
        )
        with (
            profiler,
            self._reporter() as reporter,
            garbage_collection(config.training.gc_freq, config.training.gc_debug) as collect_garbage,
            limit_spinning(self._record_busy) if device.type == "cpu" else contextlib.nullcontext(),
        ):
            yield profiler, reporter, collect_garbage

    def _reporter(self) -> MetricsReporter:
        config, device = self.config, self.engine.device
        return MetricsReporter(
            config.metrics,
            self.folder.path,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            total_steps=config.training.steps,
            start_step=self.step,
            start_tokens=self.tokens_seen,
            tokens_per_step=self.tokens_per_step,
            flops_per_token=self.engine.flops_per_token,
            peak=find_peak(device.type, device.name, getattr(torch, config.training.mixed_precision_param)),
            peak_memory_bytes=device.peak_memory_bytes,
            reset_peak_memory=device.reset_peak_memory,
            memory_capacity_bytes=device.memory_capacity_bytes(),
            synchronize=device.synchronize,
            config=dataclasses.asdict(config),
        )
