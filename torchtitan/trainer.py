"""The training loop, from a configuration to trained weights. See docs/architecture.md for the way a run goes."""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.checkpoint import CheckpointManager
from torchtitan.config import JobConfig, to_toml
from torchtitan.converters import LinearConverter, Target, apply_converters, checked_products, conversion_report
from torchtitan.converters.report import summary, to_json, to_table
from torchtitan.data import Batch, build_loader, build_validation_loader, load_tokenizer
from torchtitan.device import Device
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.explain import conversion_target
from torchtitan.logging import logger
from torchtitan.metrics import MetricsReporter, Profiler, find_peak, flops_per_token
from torchtitan.metrics.writers import JSONLWriter
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.init import init_weights
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.optimizer import build_optimizer, set_learning_rate
from torchtitan.optim.schedule import lr_factor
from torchtitan.parallel.comm import init_process_group, set_timeout
from torchtitan.parallel.context import own_positions
from torchtitan.parallel.dims import ParallelDims
from torchtitan.parallel.fsdp import reshard, set_last_microbatch
from torchtitan.parallel.pipeline import Pipeline, find_first_layers, layer_costs, split, stages_of


class Trainer:
    """One run. All ranks make one, then call `train`, within a `with` that closes what it opened.

    Args:
        config: the run; checked (`checks.check`).
        dims: its degrees of parallelism.
        global_batch_size: sequences in an optimizer step.
        device: this process's.

    Raises:
        UserError: what only shows when things are opened: data, tokenizer, checkpoint.
    """

    def __init__(self, config: JobConfig, dims: ParallelDims, global_batch_size: int, device: Device) -> None:
        training = config.training
        self._begin(config, dims, global_batch_size, device)
        if training.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        torch.manual_seed(training.seed)
        # Data first: a wrong path shows before anything expensive begins.
        tokenizer = load_tokenizer(config.model.tokenizer_path)
        self.args = MODELS.get(config.model.name).flavor(config.model.flavor).with_vocab_size(tokenizer.vocab_size)
        if tokenizer.vocab_size > self.args.vocab_size:
            raise ConfigError(
                f"model.tokenizer_path: the tokenizer has {tokenizer.vocab_size} tokens, but {config.model.name} "
                f"{config.model.flavor} has a vocabulary of {self.args.vocab_size}; use the tokenizer of this model."
            )
        init_process_group(device, config.comm)
        self._closing.callback(dist.destroy_process_group)
        self._build_meshes()
        dp_rank = self.mesh.get_local_rank("dp_replicate") * dims.dp_shard + self.mesh.get_local_rank("fsdp") // dims.cp
        hold_out = config.validation.enabled
        self.loader = build_loader(
            training,
            tokenizer,
            dp_rank=dp_rank,
            dp_size=dims.dp,
            global_batch_size=global_batch_size,
            hold_out=hold_out and config.validation.dataset is None and config.validation.dataset_path is None,
        )
        self._closing.callback(self.loader.close)
        self.validation_loader = (
            build_validation_loader(config.validation, training, tokenizer, dp_rank=dp_rank, dp_size=dims.dp)
            if hold_out
            else None
        )
        self._build()
        self.checkpoints = CheckpointManager(
            config.checkpoint, self.dump_folder, self.model, self.optimizer, identity=dataclasses.asdict(self.args)
        )
        self._closing.callback(self.checkpoints.wait)
        self._resume()
        if dist.get_rank() == 0:
            (self.dump_folder / "config.toml").write_text(to_toml(config), encoding="utf-8")

    def _begin(self, config: JobConfig, dims: ParallelDims, global_batch_size: int, device: Device) -> None:
        """What needs nothing but the configuration. (This and the `_build`s are what a simulation has in common.)"""
        self.config = config
        self.dims = dims
        self.device = device
        self.global_batch_size = global_batch_size
        self.tokens_per_step = global_batch_size * config.training.seq_len
        self.dump_folder = Path(config.job.dump_folder)
        self.step = 0
        self.tokens_seen = 0
        self.sample_ids: JSONLWriter | None = None
        self._closing = contextlib.ExitStack()

    def _build_meshes(self) -> None:
        self.mesh = self.dims.build_mesh(self.device.type)
        self.context_mesh = self.dims.build_context_mesh(self.device.type)

    def _build(self) -> None:
        """Everything that a training step computes with."""
        config, dims = self.config, self.dims
        self.model = self._build_model()
        # The loss is the mean over the tokens of the global batch. FSDP averages gradients over ranks and microbatches
        # are summed, so a rank's share is its sum times the number of ranks, over all tokens.
        self.loss_scale = dims.dp_replicate * dims.fsdp / self.tokens_per_step
        self.pipeline = self.validation_pipeline = None
        if dims.pp > 1:
            self.pipeline = self._pipeline(config.training.local_batch_size, self.loss_scale)
            self.validation_pipeline = self._pipeline(config.validation.local_batch_size)
        self.optimizer = build_optimizer(self.model.parameters(), config.optimizer)

    def _build_model(self) -> Any:
        """Meta device, converters, parallelization, then memory and numbers."""
        config = self.config
        spec = MODELS.get(config.model.name)
        with torch.device("meta"):
            model: Any = spec.build(self.args)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        embedding = model.tok_embeddings.weight.numel() if not self.args.tied_embeddings else 0
        self.flops_per_token = flops_per_token(
            self.parameters - embedding,
            self.args.n_layers,
            self.args.n_heads,
            self.args.head_dim,
            config.training.seq_len,
        )
        target = self._conversion_target(spec)
        self.passes = model.passes(target.tokens) if hasattr(model, "passes") else {}
        self.converters = apply_converters(
            model, config.model.converters, lambda section: getattr(config, section), target
        )
        self._report_conversion()
        if config.model.print_after_conversion:
            logger.info(f"after conversion:\n{model}")
        self.stages = self._split(model) if self.dims.pp > 1 else {0: model}
        self.positions = self._own_positions()
        for stage in self.stages.values():
            stage.positions = self.positions
            spec.parallelize(
                stage,
                self.mesh,
                self.context_mesh,
                config.parallelism,
                config.activation_checkpoint,
                config.training,
            )
        self._materialize(model)
        return model

    def _conversion_target(self, spec: ModelSpec) -> Target:
        return conversion_target(self.config, spec, self.device, shards=self.dims.fsdp)

    def _materialize(self, model: Any) -> None:
        """Memory and numbers."""
        training = self.config.training
        for stage in self.stages.values():
            stage.to_empty(device="cpu" if training.enable_cpu_offload else self.device.torch_device)
        init_weights(model, model.init_std, training.seed)

    def _split(self, model: Any) -> dict[int, Any]:
        """The stages of the pipeline on this rank by number; the model keeps their modules alone."""
        firsts = self._find_first_layers(model)
        rank, schedule = self.mesh.get_local_rank("pp"), self.config.parallelism.pipeline_parallel_schedule
        self.first_layers = firsts
        return split(model, firsts, stages_of(rank, self.dims.pp, len(firsts), schedule))

    def _find_first_layers(self, model: Any) -> list[int]:
        return find_first_layers(self.config.parallelism, layer_costs(model, self.config.training.seq_len))

    def _own_positions(self) -> torch.Tensor | None:
        """Of each sequence, what this rank computes; None where that is all of it, and the model sees it whole."""
        seq_len = self.config.training.seq_len
        if self.context_mesh is not None:
            method = self.config.parallelism.context_parallel_rotate_method
            return own_positions(seq_len, self.context_mesh.get_local_rank(), self.dims.cp, method)
        return torch.arange(seq_len) if self.dims.pp > 1 else None

    def _pipeline(self, local_batch_size: int, scale: float = 1.0) -> Pipeline:
        """Runs batches of so many sequences through the stages."""
        training, parallelism = self.config.training, self.config.parallelism
        rows, seq_len = parallelism.pipeline_parallel_microbatch_size, training.seq_len // self.dims.cp
        dtype = getattr(torch, training.mixed_precision_param)
        return Pipeline(
            self.stages,
            len(self.first_layers),
            self.mesh.get_group("pp"),
            parallelism,
            self.device.torch_device,
            tokens=torch.empty(rows, seq_len, dtype=torch.int64, device="meta"),
            hidden=torch.empty(rows, seq_len // self.dims.tp, self.args.dim, dtype=dtype, device="meta"),
            microbatches=local_batch_size // rows,
            scale=scale,
        )

    def _report_conversion(self) -> None:
        decisions = [converter.decisions for converter in self.converters if isinstance(converter, LinearConverter)]
        if not decisions:
            return
        report = conversion_report(decisions)
        logger.info(f"conversion to low precision:\n{to_table(report)}")
        logger.info(summary(report))
        if dist.get_rank() == 0:
            (self.dump_folder / "conversion.json").write_text(to_json(report), encoding="utf-8")

    def _resume(self) -> None:
        state = self.checkpoints.load()
        if state is None:
            return
        self.step = state.get("step", 0)
        self.tokens_seen = state.get("tokens_seen", 0)
        if "dataloader" in state:
            self.loader.load_state_dict(state["dataloader"])

    def _state(self) -> dict[str, Any]:
        """The JSON part of a checkpoint; complete on rank 0."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.loader.state_dict())
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "dataloader": self.loader.merge_states(states),
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
            self.checkpoints.save(0, self._state)
            return
        if self.step >= steps:
            logger.info(f"this run has finished its {steps} steps already; raise training.steps to go on")
            return
        self._announce()
        # Ranks of one pipeline, sequence or product have the same samples.
        if config.training.record_sample_ids and self._is_first_with_its_rows():
            path = self.dump_folder / "sample_ids" / f"rank_{dist.get_rank()}.jsonl"
            path.parent.mkdir(exist_ok=True)
            self.sample_ids = JSONLWriter(path, self.step)
        first_step = self.step + 1
        # While the first step is compiled, products of the tracing are counted too.
        checked_step = first_step + config.training.compile
        counting = any(isinstance(converter, LinearConverter) for converter in self.converters)
        with (
            Profiler(
                config.profiling,
                self.dump_folder,
                rank=dist.get_rank(),
                device_type=self.device.type,
                start_step=self.step,
                idle_until=checked_step if counting else 0,
            ) as profiler,
            self._reporter() as reporter,
            _garbage_collection(config.training.gc_freq, config.training.gc_debug) as collect_garbage,
        ):
            while self.step < steps:
                with reporter.waiting_for_data():
                    microbatches = self.loader.next()
                self.step += 1
                collect_garbage(self.step)
                with (
                    self._checked_products(len(microbatches)) if self.step == checked_step else contextlib.nullcontext()
                ):
                    self._train_step(microbatches, reporter)
                profiler.step()
                last = self.step == steps
                if self.validation_loader is not None and (last or self.step % config.validation.freq == 0):
                    with reporter.pause():
                        reporter.validation(self.step, self._validate(self.validation_loader))
                if self.checkpoints.due(self.step, last):
                    with reporter.pause():
                        self.checkpoints.save(self.step, self._state, last)
                if self.step == first_step:
                    set_timeout(config.comm.train_timeout_seconds, self._groups())
        self.checkpoints.wait()
        if self.checkpoints.last_save_failed:
            raise CheckpointError(
                "training finished, but its last checkpoint could not be saved (see above); make room and run the same "
                "command again: it goes on from the checkpoint before."
            )
        logger.info(f"training finished after step {self.step}; everything is in {self.dump_folder}")

    def _is_first_with_its_rows(self) -> bool:
        """Whether this is the first of the ranks that share their rows of the batch."""
        pp, _, fsdp, tp = self.mesh.get_coordinate() or ()
        return pp == 0 and tp == 0 and fsdp % self.dims.cp == 0

    def _train_step(self, microbatches: Sequence[Batch], reporter: MetricsReporter) -> None:
        training = self.config.training
        total = torch.zeros((), device=self.device.torch_device)
        for number, batch in enumerate(microbatches):
            set_last_microbatch(self.stages.values(), last=number == len(microbatches) - 1)
            total += self._forward_backward(*self._inputs(batch))
        grad_norm = clip_grad_norm(self.model.parameters(), training.max_norm)
        lr = self.config.optimizer.lr * lr_factor(self.step, training.steps, self.config.lr_scheduler)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for converter in self.converters:
            converter.post_optimizer_hook([self.model])
        self.tokens_seen += self.tokens_per_step
        if self.sample_ids is not None:
            self.sample_ids.write(self.step, {"ids": [ids for batch in microbatches for ids in batch.sample_ids or []]})
        reporter.step(
            self.step, loss=lambda: self._over_ranks(total) / self.tokens_per_step, grad_norm=grad_norm, lr=lr
        )

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Tokens and labels on the device, the rank's own positions of them, and what else the model is given."""
        move = functools.partial(torch.Tensor.to, device=self.device.torch_device, non_blocking=True)
        tokens, labels = batch.tokens, batch.labels
        if self.context_mesh is not None:
            tokens, labels = tokens[:, self.positions], labels[:, self.positions]
        others = {} if batch.document_ids is None else {"document_ids": move(batch.document_ids)}
        return move(tokens), move(labels), others

    def _forward_backward(
        self, tokens: torch.Tensor, labels: torch.Tensor, others: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The loss of a batch, summed over its tokens. Adds to the gradients."""
        if self.pipeline is not None:
            return self.pipeline.train(tokens, labels, **others)
        loss = self.model(tokens, labels, **others)
        (loss * self.loss_scale).backward()
        return loss.detach()

    def _checked_products(self, microbatches: int) -> contextlib.AbstractContextManager[None]:
        return checked_products(
            self.converters,
            microbatches * (self.pipeline.microbatches if self.pipeline else 1),
            self.passes,
            on_this_rank={name for name, _ in self.model.named_modules()},
            recomputed=self.config.activation_checkpoint.mode != "none",
            compiled=self.config.training.compile,
        )

    @torch.no_grad()
    def _validate(self, loader: Iterable[Batch]) -> torch.Tensor:
        """Mean loss over the tokens of the validation batches."""
        total, tokens = torch.zeros((), device=self.device.torch_device), 0
        for batch in loader:
            inputs, labels, others = self._inputs(batch)
            if self.validation_pipeline is not None:
                total += self.validation_pipeline.evaluate(inputs, labels, **others)
            else:
                total += self.model(inputs, labels, **others)
            tokens += batch.labels.numel()
        reshard(self.stages.values())
        return self._over_ranks(total) / (tokens * self.dims.dp)

    def _over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a loss over all ranks. Tensor-parallel ranks have the same one; without the last stage it is 0."""
        value = value.clone()
        dist.all_reduce(value)
        return value / self.dims.tp

    def _announce(self) -> None:
        """What was decided, and why."""
        config, training = self.config, self.config.training
        microbatches = self.global_batch_size // (training.local_batch_size * self.dims.dp)
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        dtype = training.mixed_precision_param
        saving = config.checkpoint
        lines = {
            "run": f"{config.job.description}, in {self.dump_folder}",
            "device": f"{self.device.type} ({self.device.name}{threads}), {dist.get_world_size()} process(es)",
            "layout": f"{self.dims}",
            "model": f"{config.model.name} {config.model.flavor}, {self.parameters:,} parameters",
            "precision": f"{dtype} products, float32 weights and gradient sums"
            + (f"; converters {', '.join(config.model.converters)}" if config.model.converters else ""),
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
            flops_per_token=self.flops_per_token,
            peak=find_peak(device.type, device.name, getattr(torch, config.training.mixed_precision_param)),
            peak_memory_bytes=device.peak_memory_bytes,
            reset_peak_memory=device.reset_peak_memory,
            memory_capacity_bytes=device.memory_capacity_bytes(),
            synchronize=device.synchronize,
            config=dataclasses.asdict(config),
        )

    def _groups(self) -> list[dist.ProcessGroup]:
        groups = [dist.distributed_c10d._get_default_group(), *self.mesh.get_all_groups()]
        return groups if self.context_mesh is None else [*groups, self.context_mesh.get_group()]


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
