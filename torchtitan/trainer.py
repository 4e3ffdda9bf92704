"""The training loop, from a configuration to trained weights. See docs/architecture.md for the way a run goes."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchtitan.checkpoint import CheckpointManager
from torchtitan.checkpoint.agree import everywhere
from torchtitan.checkpoint.train_state import check_kind, wrong_values_refused
from torchtitan.compute_dtype import SLOW_BFLOAT16, decide_compute_dtype
from torchtitan.config import JobConfig, to_toml
from torchtitan.converters import LinearConverter
from torchtitan.converters.measure import slowness
from torchtitan.converters.report import phases_to_json, precision_of, schedule_line, summary, to_json, to_table
from torchtitan.data import Batch, build_loader, build_validation_loader, load_tokenizer
from torchtitan.device import Device
from torchtitan.errors import CheckpointError, ConfigError, DataError
from torchtitan.interchange import Exchange, published
from torchtitan.kernels.gemm import cpu_kernel
from torchtitan.lock import FolderLock
from torchtitan.logging import logger
from torchtitan.metrics import MetricsReporter, Profiler, find_peak
from torchtitan.metrics.writers import JSONLWriter
from torchtitan.models import MODELS
from torchtitan.optim.guard import UpdateGuard
from torchtitan.optim.schedule import lr_factor
from torchtitan.parallel.comm import init_process_group, set_timeout
from torchtitan.parallel.dims import ParallelDims
from torchtitan.signals import Stop
from torchtitan.step import TrainingStep
from torchtitan.threads import spin_on_quiet_machines_only

SLOW = 4  # times the time of a layer: then a step takes longer than low precision is worth even as an experiment
DATA_ENDED = 64  # asked of `Stop` in place of a signal's number, and above those that it takes


class Trainer:
    """One run. All ranks make one, then call `train`, within a `with` that closes what it opened.

    Args:
        config: the run; checked (`checks.check`).
        dims: its degrees of parallelism.
        global_batch_size: sequences in an optimizer step.
        device: this process's.
        stop: tells when the run is to save and end.
        lock: of the dump folder, taken here; none where nobody else can be in it.

    Raises:
        UserError: what only shows when things are opened: data, tokenizer, checkpoint.
    """

    def __init__(
        self,
        config: JobConfig,
        dims: ParallelDims,
        global_batch_size: int,
        device: Device,
        stop: Stop | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        training = config.training
        self.config = config
        self.dims = dims
        self.device = device
        self.global_batch_size = global_batch_size
        self.tokens_per_step = global_batch_size * training.seq_len
        self.dump_folder = Path(config.job.dump_folder)
        self.step = 0
        self.tokens_seen = 0
        self.sample_ids: JSONLWriter | None = None
        self.skipped_updates: JSONLWriter | None = None
        self.data_error: str | None = None  # of this rank
        self.guard = UpdateGuard(training, self._record_skipped)
        self._closing = contextlib.ExitStack()

        if training.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        torch.manual_seed(training.seed)
        # Data first: a wrong path shows before anything expensive begins.
        tokenizer = load_tokenizer(config.model.tokenizer_path)
        spec = MODELS.get(config.model.name)
        args = spec.flavor(config.model.flavor).with_vocab_size(tokenizer.vocab_size)
        if tokenizer.vocab_size > args.vocab_size:
            raise ConfigError(
                f"model.tokenizer_path: the tokenizer has {tokenizer.vocab_size} tokens, but {config.model.name} "
                f"{config.model.flavor} has a vocabulary of {args.vocab_size}; use the tokenizer of this model."
            )
        self.stop = stop or Stop()
        init_process_group(device, config.comm, self.dump_folder, self.stop)
        self._closing.callback(dist.destroy_process_group)
        self.stop.connect()
        if lock is not None:
            everywhere(lock.take if dist.get_rank() == 0 else lambda: None)
        self.chosen = config.training.mixed_precision_param == "auto"
        self.config = config = decide_compute_dtype(config, device.type)
        self.work = TrainingStep(config, dims, global_batch_size, device, args)
        set_timeout(config.comm.init_timeout_seconds)
        hold_out = config.validation.enabled
        self.loader = build_loader(
            training,
            tokenizer,
            dp_rank=self.work.dp_rank,
            dp_size=dims.dp,
            global_batch_size=global_batch_size,
            hold_out=hold_out and config.validation.dataset is None and config.validation.dataset_path is None,
        )
        self._closing.callback(self.loader.close)
        self.validation_loader = (
            build_validation_loader(config.validation, training, tokenizer, dp_rank=self.work.dp_rank, dp_size=dims.dp)
            if hold_out
            else None
        )

        self.work.build()
        names = [precision_of(report) for report in self.work.conversions]
        ends = [phase.last for phase in self.work.phases]
        self.schedule = list(zip(ends, names, strict=True)) if config.precision.phase else []
        self._report_conversion()
        self._report_speed()
        self.checkpoints = CheckpointManager(
            config.checkpoint,
            self.dump_folder,
            self.work.model,
            self.work.optimizer,
            identity=dataclasses.asdict(args),
            about={
                "layout": {"processes": dist.get_world_size(), **dataclasses.asdict(dims)},
                "configuration": dataclasses.asdict(config),
            },
            exchange=Exchange(published(spec, args, config.model.tokenizer_path, training.seq_len)),
        )
        self._closing.callback(self.checkpoints.wait)
        self._resume()
        if dist.get_rank() == 0:
            self._write_config()

    def _write_config(self) -> None:
        (self.dump_folder / "config.toml").write_text(to_toml(self.config), encoding="utf-8")

    def _mend_folder(self) -> None:
        """Somebody may have removed what the run has written."""
        path = self.dump_folder / "config.toml"
        if dist.get_rank() == 0 and not path.exists():
            logger.warning(f"{path} was removed, perhaps with other files of this run; it is written again")
            with contextlib.suppress(OSError):
                self.dump_folder.mkdir(parents=True, exist_ok=True)
                self._write_config()

    def _report_conversion(self) -> None:
        reports = self.work.conversions
        if not any(reports):
            return
        for phase, report in zip(self.work.phases, reports, strict=True):
            if report:
                logger.info(f"{phase.title or 'conversion to low precision'}:\n{to_table(report)}")
                logger.info(summary(report))
        if dist.get_rank() == 0:
            ends = [phase.last for phase in self.work.phases]
            by_phase = list(zip(ends, reports, strict=True))
            text = phases_to_json(by_phase) if self.schedule else to_json(reports[0])
            (self.dump_folder / "conversion.json").write_text(text, encoding="utf-8")
        if self.work.converted_model:
            logger.info(f"after conversion:\n{self.work.converted_model}")

    def _report_speed(self) -> None:
        """On a CPU, what low precision costs; found out before anyone waits for a step."""
        if self.device.type != "cpu" or dist.get_rank() > 0:
            return
        dtype = self.config.training.mixed_precision_param
        for converter in self.work.converters:
            if not isinstance(converter, LinearConverter) or not (ratios := slowness(converter, getattr(torch, dtype))):
                continue
            found = f"{min(ratios):.1f} to {max(ratios):.1f} times as long as in {dtype}"
            line = f"{converter.name} {converter.recipe}: its layers take {found} on this CPU"
            if max(ratios) > SLOW:
                logger.warning(f"{line}; leave {converter.name} to a GPU, or expect steps that much longer")
            else:
                logger.info(f"{line}{cpu_kernel(converter.products.trace.operation)}")

    def _resume(self) -> None:
        state = self.checkpoints.load(self._prepare)
        if state is None:
            return
        self.step = state.get("step", 0)
        self.tokens_seen = state.get("tokens_seen", 0)
        with wrong_values_refused():
            if "guard" in state:
                self.guard.load_state_dict(state["guard"])
            if "dataloader" in state:
                check_kind(state["dataloader"], {"positions": self.loader.state_dict()["positions"]}, "dataloader")
                self.loader.load_state_dict(state["dataloader"])
            self.work.load_converter_state(state.get("converters", {}))

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Before the tensors of a checkpoint are loaded: what is saved was in the phase of its last step."""
        if state["step"] > 0:
            self.work.enter_phase_of(state["step"])
        with wrong_values_refused():
            saved = [(last, str(name)) for last, name in state.get("precision_schedule", [])]
        if saved and saved != self.schedule:
            now = schedule_line(self.schedule) if self.schedule else "none"
            logger.warning(
                f"the checkpoint of step {state['step']} had the precision schedule {schedule_line(saved)}; it is "
                f"{now} from here on (a share such as until = 0.9 is of training.steps)"
            )

    def _state(self) -> dict[str, Any]:
        """The JSON part of a checkpoint; complete on rank 0."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.loader.state_dict())
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "guard": self.guard.state_dict(),
            "dataloader": self.loader.merge_states(states),
            **({"precision_schedule": self.schedule} if self.schedule else {}),
            "converters": self.work.converter_state(),
        }

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._closing.close()
        else:  # other ranks may be gone: wait for nobody
            self.loader.close()

    def train(self) -> None:
        """Trains up to `training.steps`."""
        config, steps = self.config, self.config.training.steps
        if config.checkpoint.create_seed_checkpoint:
            if self.checkpoints.step_on_disk is not None:
                raise CheckpointError(
                    f"checkpoint.create_seed_checkpoint: {self.checkpoints.folder} holds checkpoints already, so a run "
                    "would not begin from a seed; choose another --job.dump_folder."
                )
            self.checkpoints.save(0, self._state)
            return
        if self.step >= steps:
            logger.info(f"this run has finished its {steps} steps already; raise training.steps to go on")
            self.checkpoints.export(self.step)
            return
        self._announce()
        # Ranks of one pipeline, sequence or product have the same samples.
        if config.training.record_sample_ids and self.work.is_first_with_its_rows:
            path = self.dump_folder / "sample_ids" / f"rank_{dist.get_rank()}.jsonl"
            path.parent.mkdir(exist_ok=True)
            self.sample_ids = JSONLWriter(path, self.step)
        if dist.get_rank() == 0:
            self.skipped_updates = JSONLWriter(self.dump_folder / "skipped_updates.jsonl", self.step)
        first_step = self.step + 1
        steps_to_check = self.work.steps_to_check(first_step)
        with (
            Profiler(
                config.profiling,
                self.dump_folder,
                rank=dist.get_rank(),
                device_type=self.device.type,
                start_step=self.step,
                busy=steps_to_check,
            ) as profiler,
            self._reporter() as reporter,
            _garbage_collection(config.training.gc_freq, config.training.gc_debug) as collect_garbage,
            spin_on_quiet_machines_only() if self.device.type == "cpu" else contextlib.nullcontext(),
        ):
            while self.step < steps and self._has_data(reporter) and not self._agreed():
                self.stop.progress.begins()
                with record_function("data"):
                    microbatches = self.loader.next()
                self.step += 1
                collect_garbage(self.step)
                switched = self.work.enter_phase_of(self.step)
                if switched:
                    logger.info(f"step {self.step}: {self.schedule[self.work.phase][1]} from here on")
                    if config.training.compile:
                        set_timeout(config.comm.init_timeout_seconds)
                checked = self.step in steps_to_check
                with self.work.checked_products(len(microbatches)) if checked else contextlib.nullcontext():
                    self._train_step(microbatches, reporter)
                self.stop.progress.ends()
                profiler.step()
                reporter.measure_peak()
                last = self.step == steps
                validating = last or self.step % config.validation.freq == 0
                if self.validation_loader is not None and validating and not self.stop.agreed():
                    with reporter.pause():
                        loss = self.work.validate(self.validation_loader, self.stop.agreed)
                        if loss is not None:
                            reporter.validation(self.step, loss)
                if self.checkpoints.due(self.step, last):
                    with reporter.pause():
                        self._mend_folder()
                        self.checkpoints.save(self.step, self._state, last)
                if self.step == first_step and self.work.fused_products is not None:
                    self.work.fused_products.check()
                if self.step == first_step or (switched and config.training.compile):
                    set_timeout(config.comm.train_timeout_seconds)
        if self.step < steps:
            self._end_early()
            return
        self.checkpoints.wait()
        if self.checkpoints.last_save_failed:
            raise CheckpointError(
                "training finished, but its last checkpoint could not be saved (see above); make room and run the same "
                "command again: it goes on from the checkpoint before."
            )
        self.checkpoints.export(self.step)
        self._mend_folder()
        logger.info(f"training finished after step {self.step}; everything is in {self.dump_folder}")

    def _has_data(self, reporter: MetricsReporter) -> bool:
        """Waits until the next batches are there, or a signal is. Data that cannot be read on this rank ask all ranks
        to save and end, as a signal does. True, always: whether to end is for all to agree on."""
        try:
            with reporter.waiting_for_data():
                self.loader.wait(given_up=lambda: self.stop.requested)
        except DataError as error:
            self.data_error = str(error)
        return True

    def _agreed(self) -> bool:
        return self.stop.agreed(DATA_ENDED if self.data_error else 0)

    def _end_early(self) -> None:
        """Saves, and says how to go on."""
        self.guard.read()
        if self.stop.agreed_on == DATA_ENDED:
            errors: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, self.data_error)
            if self.checkpoints.save_before_stop(self.step, self._state):
                logger.info(f"the data cannot be read on after step {self.step}, which is saved")
            raise DataError(next(error for error in errors if error is not None))
        stopped = f"stopped by {self.stop.name}"
        if self.checkpoints.save_before_stop(self.step, self._state):
            logger.info(f"{stopped} after step {self.step}, which is saved: the same command goes on from there")
        elif self.checkpoints.last_save_failed:
            raise CheckpointError(
                f"{stopped} after step {self.step}, which could not be saved (see above); make room and run the same "
                "command again: it goes on from the checkpoint before."
            )
        elif self.stop.has_trained:
            logger.info(
                f"{stopped} after step {self.step}; nothing is saved, since checkpoint.enable_checkpoint is off"
            )
        else:
            logger.info(f"{stopped} before a step was done: the same command starts it again")

    def _train_step(self, microbatches: Sequence[Batch], reporter: MetricsReporter) -> None:
        lr = self.config.optimizer.lr * lr_factor(self.step, self.config.training.steps, self.config.lr_scheduler)
        rows = [row for batch in microbatches for row in batch.sample_ids or []]
        sample_ids = [sample for row in rows for sample in row]
        loss, grad_norm = self.work.run(
            microbatches,
            lr,
            lambda loss, norm, hidden: self.guard.skips(self.step, loss, norm, hidden, sample_ids),
        )
        self.tokens_seen += self.tokens_per_step
        if self.sample_ids is not None:
            self.sample_ids.write(self.step, {"ids": rows})
        reporter.step(
            self.step,
            loss=lambda: self.work.over_ranks(loss) / self.tokens_per_step,
            grad_norm=grad_norm,
            lr=lr,
            skipped_updates=self.guard.read,
            failed_saves=self.checkpoints.failed_saves,
            **({"precision_phase": self.work.phase + 1} if self.schedule else {}),
        )

    def _record_skipped(self, step: int, values: Mapping[str, Any]) -> None:
        if self.skipped_updates is not None:
            self.skipped_updates.write(step, values)

    def _announce(self) -> None:
        """What was decided, and why."""
        config, training = self.config, self.config.training
        microbatches = self.global_batch_size // (training.local_batch_size * self.dims.dp)
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        dtype = training.mixed_precision_param
        why = f" ({SLOW_BFLOAT16})" if self.chosen and dtype == "float32" else ""
        saving = config.checkpoint
        lines = {
            "run": f"{config.job.description}, in {self.dump_folder}",
            "device": f"{self.device.type} ({self.device.name}{threads}), {dist.get_world_size()} process(es)",
            "layout": f"{self.dims}",
            "model": f"{config.model.name} {config.model.flavor}, {self.work.parameters:,} parameters",
            "precision": f"{dtype} products{why}, {training.weight_dtype} weights, float32 gradient sums"
            + (f"; converters {', '.join(config.model.converters)}" if config.model.converters else "")
            + (f"; schedule: {schedule_line(self.schedule)}" if self.schedule else ""),
            "data": self.loader.description,
            "batch": f"{self.global_batch_size} x {training.seq_len} = {self.tokens_per_step:,} tokens a step"
            f" ({training.local_batch_size} x {self.dims.dp} ranks x {microbatches} microbatches)",
            "steps": f"{self.step + 1} to {training.steps}, {training.steps * self.tokens_per_step:,} tokens in all",
            "activations": {"none": "all kept", "full": "recomputed in every layer"}.get(
                config.activation_checkpoint.mode,
                f"recomputed selectively ({config.activation_checkpoint.selective_ac_option})",
            ),
            "compile": "each block" if training.compile else "off",
            "checkpoints": f"every {saving.interval} steps to {self.checkpoints.folder}"
            if saving.enable_checkpoint
            else "off (--checkpoint.enable_checkpoint to save and resume)",
        }
        for name, line in lines.items():
            logger.info(f"{name:12} {line}")

    def _reporter(self) -> MetricsReporter:
        config, device = self.config, self.device
        return MetricsReporter(
            config.metrics,
            self.dump_folder,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            total_steps=config.training.steps,
            start_step=self.step,
            tokens_per_step=self.tokens_per_step,
            flops_per_token=self.work.flops_per_token,
            peak=find_peak(device.type, device.name, getattr(torch, config.training.mixed_precision_param)),
            peak_memory_bytes=device.peak_memory_bytes,
            reset_peak_memory=device.reset_peak_memory,
            memory_capacity_bytes=device.memory_capacity_bytes(),
            synchronize=device.synchronize,
            config=dataclasses.asdict(config),
        )


@contextlib.contextmanager
def _garbage_collection(freq: int, debug: bool) -> Iterator[Callable[[int], None]]:
    """Python's collector runs when told, at the same step on every rank, so that no rank waits for another's."""

    def collect(step: int) -> None:
        if debug:
            found = gc.collect()
            logger.info(f"step {step}: garbage collection found {found} unreachable objects")
        elif step % freq == 0:
            gc.collect(1)

    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
