"""Decides when to save and what to load; torch.distributed.checkpoint writes and reads the tensors."""

import contextlib
import dataclasses
import gc
import json
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torchtitan
from torchtitan.checkpoint.base import Checkpoints
from torchtitan.checkpoint.choose import (
    check_model_identity,
    check_start,
    check_tensors,
    choose_step,
    log_other_rope,
    newest_of_same_command,
)
from torchtitan.checkpoint.dcp_metadata import read_metadata
from torchtitan.checkpoint.files import CheckpointReader, CheckpointWriter, TensorsOnlyPlanner, first_line
from torchtitan.checkpoint.folder import (
    EXPORTED,
    keep_latest,
    make_folder,
    run_steps,
    saved_steps,
    step_folder,
    step_writer,
)
from torchtitan.checkpoint.manifest import TRAIN_STATE, read_manifest
from torchtitan.checkpoint.others import TORCHTITAN, program_of, read_torchtitan
from torchtitan.checkpoint.state_dict import (
    has_averages,
    load_optimizer_tensors,
    model_tensors,
    names_not_finite,
    not_finite,
    optimizer_tensors,
    refuse_not_finite,
    second_moments_as_saved,
)
from torchtitan.checkpoint.store import fetched_folder, os_errors, store_of
from torchtitan.checkpoint.tokenizer import check_tokenizer
from torchtitan.checkpoint.train_state import TrainState, read_train_state
from torchtitan.compat.distributed import is_closed
from torchtitan.compat.torchao import allow_float8_weights
from torchtitan.config.fields import tokens_in
from torchtitan.config.output import Checkpoint
from torchtitan.config.system import Comm
from torchtitan.errors import CheckpointError
from torchtitan.files import any_path, is_remote, joined
from torchtitan.launcher.folder_lock import is_removed
from torchtitan.logging import logger
from torchtitan.optim.weight_average import begin_averages
from torchtitan.parallel.object_collectives import all_gather_object, from_rank_0, raise_on_all_ranks
from torchtitan.parallel.process_group import failed_collective
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.protocols import Decoder, ModelArgs

VERSIONS = {"torchtitan": torchtitan.__version__, "torch": torch.__version__, "python": platform.python_version()}
MOST_FAILED = 2  # saves, before the first that does not fail
Tensors = Mapping[str, torch.Tensor]


class WeightExchange(Protocol):
    """Imports and exports folders in other formats (`interchange.Exchange`)."""

    def record_args(self, args: ModelArgs | None, seq_len: int) -> None: ...
    def find(self, folder: Path) -> Any | None: ...
    def load(self, source: Any, tensors: Tensors) -> int: ...
    def export(self, folder: Path, tensors: Tensors, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None: ...


class Stager(DefaultStager):
    """Copies tensors into host memory, on every rank or on none: others would wait for a rank that failed alone."""

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        staged, error = None, None
        try:
            staged = super().stage(state_dict, **kwargs)
        except (MemoryError, RuntimeError) as failure:
            error = first_line(failure)
        for rank, failed in enumerate(all_gather_object(error)):
            if failed is not None:
                raise RuntimeError(f"rank {rank} could not copy its tensors into host memory: {failed}")
        return staged


@dataclasses.dataclass(eq=False)
class CheckpointManager(Checkpoints):
    """Saves and loads the state of one run. Every rank creates one, and calls its methods at the same steps."""

    config: Checkpoint  # without `enable_checkpoint`, only `initial_load_path` is used
    dump_folder: Path
    model: nn.Module  # saved, and loaded in place, as is the optimizer
    optimizer: torch.optim.Optimizer
    identity: dict[str, Any]  # family, flavor and sizes, JSON-able; another model's checkpoint is refused
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `configuration`, layout: for the manifest
    on_saved: Callable[[int], None] = lambda step: None  # called on rank 0 for what is on disk, perhaps in a thread
    exchange: WeightExchange | None = None  # for `initial_load_path` and `last_save_in_hf`
    last_step: int | None = None  # a checkpoint of it that holds only the weights is all that a finished run needs
    save_timeout_seconds: int = Comm.save_timeout_seconds  # limit for the collectives of saves and exports
    tokenizer: Mapping[str, Any] | None = None  # its identity; a checkpoint of another one is refused

    def __post_init__(self) -> None:
        self.folder = joined(self.dump_folder, self.config.folder)
        self.identity = json.loads(json.dumps(self.identity))  # JSON reads a tuple back as a list
        self.excluded = set(self.config.exclude_from_loading)
        self._export_dtype: torch.dtype = getattr(torch, self.config.export_dtype)
        self._saved = False  # whether a save of this start is on disk
        self._begins_late = True  # whether an average that begins does so from weights that are trained already
        self._longest = 0  # tokens in a sequence that the loaded weights were trained on
        self.former_configuration = {}
        self._group: dist.ProcessGroup | None = None
        self._stager: Stager | None = None
        self._pending: Future[None] | None = None
        self._reached = self._kept = 0  # multiples of `keep_every`, by the last save and by the last one on disk
        self._permanent: set[int] = set()
        if self.config.enable_checkpoint:
            # Ranks write at different speeds, for longer than a training step may take.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.save_timeout_seconds))
            from_rank_0(self._make_folder)

    def _make_folder(self) -> None:
        with os_errors(f"checkpoint.folder: {self.folder} cannot be created"):
            make_folder(self.folder)

    # Loading

    def load(self) -> TrainState | None:
        """Loads the configured checkpoint into model and optimizer: with `load_step = -1` the newest intact one, while
        damaged ones are reported. A new run starts only if there are no signs of an earlier one.

        Returns:
            The state passed to `save`, if the run resumes from it, without the parts in `exclude_from_loading`. None
            for a new run (perhaps with loaded weights).
        """
        steps = from_rank_0(lambda: run_steps(self.folder)) if self.config.enable_checkpoint else []
        if not self.config.enable_checkpoint:
            super().load()
        elif (self.config.load_step != -1 or self.excluded) and (
            step := newest_of_same_command(self.folder, steps, self.about.get("configuration"))
        ) is not None:
            self.excluded = set()
            return self._resume(step)
        elif (step := choose_step(self.folder, steps, self.config.load_step, self.dump_folder)) is not None:
            return self._resume(step)
        return self._load_initial(self.config.initial_load_path) if self.config.initial_load_path else None

    def _load_initial(self, given: str) -> TrainState | None:
        path = raise_on_all_ranks(lambda: fetched_folder(any_path(given), "checkpoint.initial_load_path"))
        everything = self.config.continue_from_path
        weights_only = self.config.initial_load_model_weights_only and not everything
        source = None if self.exchange is None else self.exchange.find(path)
        if self.exchange is not None and source is not None:
            if not weights_only:
                key = "continue_from_path is on" if everything else "initial_load_model_weights_only is off"
                raise CheckpointError(f"checkpoint.{key}, but {path} holds only weights; change that.")
            if "model" not in self.excluded:
                self._record_length(self.exchange.load(source, model_tensors(self.model)))
                self.loaded_weights = True
            return None
        check_start(path)
        state = self._load(path, weights_only)
        return None if weights_only else state

    def _resume(self, step: int) -> TrainState:
        state = self._load(step_folder(self.folder, step), False, resumes=True)
        self.step_on_disk = None if "train_state" in self.excluded else state.step
        if self.config.initial_load_path:
            logger.info(
                f"checkpoint.initial_load_path = {self.config.initial_load_path} is passed over: the run resumes from "
                f"{step_folder(self.folder, step)}"
            )
        return state

    def _load(self, path: Path, weights_only: bool, resumes: bool = False) -> TrainState:
        """Loads an intact checkpoint, of this run if it `resumes`, after checking that it is of this model."""
        of_torchtitan = not resumes and program_of(path) is TORCHTITAN

        def read() -> tuple[TrainState, Metadata, Any]:
            try:
                if of_torchtitan:
                    return read_torchtitan(path)
                manifest = read_manifest(path)
                state = read_train_state(path, manifest.step)
                return state, read_metadata(path, manifest.files), manifest.configuration
            except CheckpointError as error:
                raise CheckpointError(f"{path} cannot be loaded: {str(error).rstrip('.')}.") from None

        state, metadata, configuration = raise_on_all_ranks(read)
        if resumes or (of_torchtitan and not weights_only):
            self.former_configuration = configuration if isinstance(configuration, dict) else {}
        if state.identity is not None and not weights_only:
            check_model_identity(path, state.identity, self.identity)
        excluded, tokenizer = self.excluded, self.tokenizer
        goes_on = not weights_only and "dataloader" not in excluded  # with the data
        if tokenizer is not None and excluded.isdisjoint({"model", "tokenizer"}):
            raise_on_all_ranks(lambda: check_tokenizer(path, state, configuration, tokenizer, goes_on))
        finished = self.last_step is not None and state.step >= self.last_step
        if state.weights_only and not weights_only and not (resumes and finished):
            raise CheckpointError(
                f"{path} holds only the weights (checkpoint.last_save_model_weights_only), so "
                + (
                    "the run cannot resume from it; choose an earlier one with --checkpoint.load_step, or start a new "
                    f"run with --checkpoint.initial_load_path={path} and another --job.dump_folder."
                    if resumes
                    else "turn checkpoint.initial_load_model_weights_only on, or continue_from_path off."
                )
            )
        has_data = state.dataloader is not None or state.weights_only or state.step == 0 or state.identity is None
        if goes_on and not has_data:
            raise CheckpointError(
                f"{path} cannot be loaded: {TRAIN_STATE} has no positions in the data. Choose another checkpoint with "
                "--checkpoint.load_step, or restart the data with --checkpoint.exclude_from_loading=dataloader."
            )
        if state.identity is not None and not resumes:  # keys that a resume changes are logged anyway
            log_other_rope(path, state.identity, self.identity)
        if not weights_only and "train_state" not in excluded:
            self._reached = self._kept = self._multiples(state.step, state.tokens_seen)
        model = {} if "model" in excluded else model_tensors(self.model)
        without_optimizer = weights_only or state.weights_only or "optimizer" in excluded or state.step == 0
        saved = () if without_optimizer else metadata.state_dict_metadata
        with second_moments_as_saved(self.model, self.optimizer, saved):
            averages = has_averages(saved)
            optimizer = {} if without_optimizer else optimizer_tensors(self.model, self.optimizer, averages)
            tensors = {**model, **optimizer}
            check_tensors(path, metadata, model, optimizer)
            try:
                if any(all_gather_object(bool(tensors))):
                    if of_torchtitan:
                        allow_float8_weights()
                    dcp.load(tensors, storage_reader=CheckpointReader(path, metadata), planner=TensorsOnlyPlanner())
            except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{path} could not be loaded: {first_line(error)}. Choose another checkpoint with "
                    "--checkpoint.load_step, or move this one away."
                ) from error
            remedy = "Choose an earlier one" + (" with --checkpoint.load_step." if resumes else ".")
            raise_on_all_ranks(lambda: refuse_not_finite(path, names_not_finite(model), remedy))
            self.loaded_weights = "model" not in excluded
            if optimizer:  # the model's tensors were loaded in place
                load_optimizer_tensors(self.model, self.optimizer, {key: tensors[key] for key in optimizer})
        if self.loaded_weights:
            self._record_length(state.seq_len or 0)
        left_out = f", without {', '.join(sorted(excluded))}" if excluded else ""
        logger.info(f"loaded {'the weights of ' if weights_only else ''}{path}{left_out}")
        # New weights are initialized later, so that their average begins with the first update.
        self._begins_late = weights_only or (bool(optimizer) and self.loaded_weights)
        if averages and not has_averages(optimizer):
            logger.warning(
                f"optimizer.ema_decay is unset: the moving average in {path} ends here; one that is switched on later "
                "begins anew, from the weights at that step"
            )
        if of_torchtitan and not weights_only:
            logger.info(
                "the data begin from the start: torchtitan's position in them is a pickle, which is not read; to pass "
                f'over what it has read, set training.skip_steps = ["1-{state.step}"]'
            )
        return state.without(excluded)

    def _record_length(self, seq_len: int) -> None:
        """Checkpoints and exports are of a model for sequences of this length, even if the run has shorter ones."""
        self._longest = max(self._longest, seq_len)
        if self.exchange is not None:
            self.exchange.record_args(None, seq_len)

    # Carrying state from one stage to the next

    @torch.no_grad()
    def take_state(self) -> dict[str, torch.Tensor]:
        """A copy in host memory of what this rank trains: its shards, by name. The manager drops the model and the
        optimizer, so that others can be built in their memory."""
        tensors = {**model_tensors(self.model), **optimizer_tensors(self.model, self.optimizer)}
        copies = {name: local_tensor(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}
        del self.model, self.optimizer
        return copies

    @torch.no_grad()
    def hand_on(
        self, state: Mapping[str, torch.Tensor], model: Decoder, optimizer: torch.optim.Optimizer, seq_len: int
    ) -> None:
        """Continues with this model, for sequences of `seq_len` tokens, and its optimizer; both get the state taken."""
        self.model, self.optimizer = model, optimizer
        # For later checkpoints and exports: RoPE may be another one. A new dict: a save in the background may still
        # have to write the old one.
        self.identity = {**self.identity, **json.loads(json.dumps(dataclasses.asdict(model.args)))}
        if self.exchange is not None:
            self.exchange.record_args(model.args, seq_len)
        tensors = optimizer_tensors(model, optimizer, has_averages(state))
        for name, tensor in {**model_tensors(model), **tensors}.items():
            local_tensor(tensor).copy_(state[name])
        load_optimizer_tensors(model, optimizer, tensors)

    def begin_average(self, step: int) -> None:
        if self._begins_late and begin_averages(self.optimizer):
            logger.info(f"the moving average begins at step {step}, from the weights there (optimizer.ema_decay)")
        self._begins_late = True

    # Saving

    def due(self, step: int, last: bool, tokens_seen: int = 0) -> bool:
        """Whether to save a checkpoint after `step`."""
        first = step == 1 and self.config.enable_first_step_checkpoint
        regular = step % self.config.interval == 0 or self._multiples(step, tokens_seen) > self._reached
        return self.config.enable_checkpoint and (last or first or regular)

    def _multiples(self, step: int, tokens_seen: int) -> int:
        """How many multiples of `keep_every` are reached."""
        every = self.config.keep_every
        if isinstance(every, str):
            return tokens_seen // tokens_in(every)
        return 0 if every is None else step // every

    def save(self, step: int, state: Callable[[], TrainState], last: bool = False, keep: bool = False) -> None:
        """Saves after `step`. A failed save (such as a full disk) is reported and counted; training continues, and
        earlier checkpoints stay. Raises a CheckpointError if the first `MOST_FAILED` saves of this start have failed.

        Args:
            state: returns the run's part of the state; called on every rank, rank 0's result is written.
            last: of the run, so that `last_save_model_weights_only` applies.
            keep: never remove this checkpoint. Step 0 and the first one saved at or after each multiple of
                `keep_every` are always kept.
        """
        self.wait()
        if not last:
            self._require_a_save()  # saves in the background count, too
        self.last_save_failed = False
        weights_only = last and self.config.last_save_model_weights_only
        train_state = state()
        train_state.weights_only, train_state.identity = weights_only, self.identity
        train_state.tokenizer = None if self.tokenizer is None else dict(self.tokenizer)
        train_state.seq_len = max(train_state.seq_len or 0, self._longest)
        if dist.get_rank() == 0 and not is_remote(self.folder) and is_removed(self.folder):
            logger.warning(f"{self.folder} was removed, with all checkpoints in it; creating it again")
        if lost := self._not_finite(self._export_dtype if weights_only else None):
            self._finish(step, RuntimeError(lost))
            return None if last else self._require_a_save()
        # Asking a new optimizer for its state makes it count a step.
        tensors = self._tensors(weights_only) if step else model_tensors(self.model)
        self._reached = self._multiples(step, train_state.tokens_seen)
        keep = keep or step == 0 or self._reached > self._kept
        about = {"versions": VERSIONS, **self.about, "keep": keep}
        writer = step_writer(self.folder, step, train_state.to_json(), about)
        error: BaseException | None = None
        try:
            if self.config.async_mode != "disabled" and not last:
                self._pending = self._start(tensors, writer, step)
                return
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except (CheckpointException, OSError, RuntimeError) as failure:
            if failed_collective(failure):  # a lost rank, not a failed save
                raise
            error = failure
        self._finish(step, error)
        dist.barrier(self._group)  # rank 0 deletes old checkpoints, longer than a step's collectives wait
        if not last:
            self._require_a_save()

    def export(self, step: int) -> None:
        if not (self.config.enable_checkpoint and self.config.last_save_in_hf and self.exchange):
            return
        folder = step_folder(self.folder, step, EXPORTED)

        def is_exported() -> bool:
            with os_errors(f"{folder} cannot be written"):
                return store_of(folder).exists(folder)

        if not from_rank_0(is_exported):
            self.exchange.export(folder, model_tensors(self.model), self._export_dtype, self._group)

    def save_before_stop(self, step: int, state: Callable[[], TrainState]) -> bool:
        self.wait()
        if self.config.enable_checkpoint and step > 0 and step != self.step_on_disk:
            self.save(step, state)
            self.wait()
        return step == self.step_on_disk

    def newest_on_disk(self) -> int | None:
        """The step from which the same command would resume, as far as this process knows; None if there is none. It
        may be in the folder without having been loaded as a whole (`exclude_from_loading`)."""
        if self.step_on_disk is None and self.config.enable_checkpoint and not is_remote(self.folder):
            with contextlib.suppress(OSError):
                return max(saved_steps(self.folder), default=None)
        return self.step_on_disk

    def wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _tensors(self, weights_only: bool) -> dict[str, torch.Tensor]:
        tensors = model_tensors(self.model)
        if not weights_only:
            begin_averages(self.optimizer)  # in the checkpoint of step 0, before the first update
            return {**tensors, **optimizer_tensors(self.model, self.optimizer)}
        exact = dict(self.model.named_buffers()).keys()  # the biases of experts: rounded, they would choose others
        return {name: tensor if name in exact else tensor.to(self._export_dtype) for name, tensor in tensors.items()}

    def _not_finite(self, dtype: torch.dtype | None) -> str:
        """Why the weights cannot be saved in `dtype` (None: their own), the same on every rank; "" if they can."""
        names = set().union(*all_gather_object(names_not_finite(model_tensors(self.model), dtype)))
        if names and dtype is None:
            return f"{min(names)} has numbers that are not finite (NaN or infinity)"
        return not_finite(min(names), dtype) if names and dtype else ""

    def _start(self, tensors: dict[str, torch.Tensor], writer: CheckpointWriter, step: int) -> "Future[None]":
        """Copies the tensors and starts writing them. The future completes when the checkpoint is published."""
        if self._stager is None or is_closed(self._stager):  # reused: it keeps the memory of its copies
            pinned = self.config.async_mode == "async_with_pinned_mem"
            self._stager = Stager(StagingOptions(pinned, False, False, False))
        started = dcp.async_save(tensors, storage_writer=writer, process_group=self._group, async_stager=self._stager)
        written = started if isinstance(started, Future) else started.upload_completion
        finished: Future[None] = Future()

        def finish(_: object) -> None:
            try:
                self._finish(step, written.exception())
                finished.set_result(None)
            except BaseException as error:  # otherwise `wait` would block forever
                finished.set_exception(error)

        written.add_done_callback(finish)
        return finished

    def _finish(self, step: int, error: BaseException | None) -> None:
        """After the checkpoint is published or has failed; the same outcome on every rank."""
        if error is not None:
            self._failed(step, error)
            return
        self.step_on_disk, self._kept, self._saved = step, self._reached, True
        if dist.get_rank() == 0:
            logger.info(f"saved {step_folder(self.folder, step)}")
            self.on_saved(step)
            keep_latest(self.folder, self.config.keep_latest_k, step, self._permanent)

    @property
    def _saves_are_hopeless(self) -> bool:
        return self.failed_saves >= MOST_FAILED and not self._saved

    def _require_a_save(self) -> None:
        """Raises a CheckpointError if this start's first saves have all failed: so will the others, it seems."""
        if self._saves_are_hopeless:
            raise CheckpointError(
                f"the first {self.failed_saves} saves have failed (see above), so the run stops: all that it "
                f"computes would be lost. Correct the cause, or checkpoint.folder ({self.folder}), and run the same "
                "command again."
            )

    def _failed(self, step: int, error: BaseException) -> None:
        gc.collect()  # reference cycles in the error's traceback hold the copies of all tensors
        self.failed_saves += 1
        self.last_save_failed = True
        if dist.get_rank() == 0:
            store_of(self.folder).give_up(step_folder(self.folder, step))
            logger.error(
                f"the checkpoint of step {step} could not be saved ({first_line(error)}); {self.failed_saves} saves "
                f"failed so far. {'' if self._saves_are_hopeless else 'Training continues; '}"
                "earlier checkpoints are not affected."
            )
