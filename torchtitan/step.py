"""The training step, and all that it computes with: model, converters, layout, optimizer.

It knows no data set, no checkpoint and no report; the trainer feeds it, and a plan simulates it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchtitan.config import JobConfig
from torchtitan.converters import (
    Decision,
    LayerVariants,
    LinearConverter,
    ModelConverter,
    Target,
    apply_converters,
    apply_variants,
    checked_gemms,
    conversion_report,
    layer_variants,
)
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.engine.explain import conversion_target
from torchtitan.engine.memory_check import check_memory
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.init import init_weights
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.in_backward import StepInBackward
from torchtitan.optim.optimizer import build_optimizer, decay_groups, set_learning_rate, update
from torchtitan.parallel.async_tensor import enable_async_tensor_parallel
from torchtitan.parallel.context import own_positions
from torchtitan.parallel.dims import ParallelDims
from torchtitan.parallel.fsdp import reshard, set_last_microbatch
from torchtitan.parallel.pipeline import Passes, Pipeline, find_first_layers, layer_costs, split, stages_of
from torchtitan.precision import phase_of, phases_of

Skips = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""From this rank's summed loss, the gradient norm, and whether its layers have rounded what is not finite (None where
none can) to a scalar, above 0 where the update is left out; the same on every rank. None: it is made."""


class TrainingStep:
    """One rank's part of a training step. The process group must be there; all ranks make one, and call it together.

    Args:
        config: the run; checked.
        dims: its degrees of parallelism.
        global_batch_size: sequences in an optimizer step.
        device: this process's.
        args: sizes of the model.

    Attributes:
        model: what this rank holds of it, under the names of the whole.
        stages: of the pipeline, by number; without a pipeline the model alone.
        mesh: (pp, dp_replicate, fsdp, tp).
        context_mesh: the ranks that share a sequence, or None.
        positions: of each sequence, what this rank computes; None where that is all of it.
        phases: of the precision schedule; a single one without.
        phase: which of them the model is in, from 0.
        converters_by_phase: of each.
    """

    def __init__(
        self, config: JobConfig, dims: ParallelDims, global_batch_size: int, device: Device, args: Any
    ) -> None:
        self.config = config
        self.dims = dims
        self.device = device
        self.args = args
        self.tokens_per_step = global_batch_size * config.training.seq_len
        self.mesh = dims.build_mesh(device.type)
        self.context_mesh = dims.build_context_mesh(device.type)

    def build(self) -> None:
        """Model, layout, optimizer, memory."""
        config, dims = self.config, self.dims
        asynchronous = config.parallelism.enable_async_tensor_parallel
        self.fused_gemms = enable_async_tensor_parallel(self.mesh["tp"]) if asynchronous else None
        self.model = self._build_model()
        # The loss is the mean over the tokens of the global batch. FSDP averages gradients over ranks and microbatches
        # are summed, so a rank's share is its sum times the number of ranks, over all tokens.
        self.loss_scale = dims.dp_replicate * dims.fsdp / self.tokens_per_step
        self.pipeline = self.validation_pipeline = None
        if dims.pp > 1:
            self.pipeline = self._pipeline(config.training.local_batch_size, self.loss_scale)
            if config.validation.enabled:
                self.validation_pipeline = self._pipeline(config.validation.local_batch_size)
        self.optimizer = build_optimizer(
            decay_groups(self.model, config.optimizer), config.optimizer, config.training.seed
        )
        self.in_backward = None
        if config.optimizer.early_step_in_backward:
            self.in_backward = StepInBackward(self.model.parameters(), self.optimizer)

    @property
    def dp_rank(self) -> int:
        """Which of the `dims.dp` slices of a global batch is this rank's."""
        return self.mesh.get_local_rank("dp_replicate") * self.dims.dp_shard + (
            self.mesh.get_local_rank("fsdp") // self.dims.cp
        )

    @property
    def is_first_with_its_rows(self) -> bool:
        """Whether this is the first of the ranks that share a slice of the batch."""
        pp, _, fsdp, tp = self.mesh.get_coordinate() or ()
        return pp == 0 and tp == 0 and fsdp % self.dims.cp == 0

    def _build_model(self) -> Any:
        """Meta device, converters, parallelization, then memory and numbers."""
        config = self.config
        spec = MODELS.get(config.model.name)
        model = self._convert(spec)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        embedding = model.tok_embeddings.weight.numel() if not self.args.tied_embeddings else 0
        self.flops_per_token = flops_per_token(
            self.parameters - embedding,
            self.args.n_layers,
            self.args.n_heads,
            self.args.head_dim,
            config.training.seq_len,
        )
        self.converted_model = str(model) if config.model.print_after_conversion else ""
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

    def _convert(self, spec: ModelSpec) -> Any:
        """The whole model on the meta device, as the first phase computes it, and what becomes of it in the others."""
        self.phases, self.phase = phases_of(self.config), 0
        target = self._conversion_target(spec)
        built: list[tuple[Any, list[ModelConverter]]] = []
        for phase in self.phases:
            with torch.device("meta"):
                model: Any = spec.build(self.args)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(torch, self.config.training.weight_dtype))
            self.passes = model.passes(target.tokens) if hasattr(model, "passes") else {}
            with phase.named():
                section_of = functools.partial(getattr, phase.config)
                built.append((model, apply_converters(model, phase.config.model.converters, section_of, target)))
        self.converters_by_phase = [converters for _, converters in built]
        for converters in self.converters_by_phase:
            for converter in converters:
                if isinstance(converter, LinearConverter):
                    converter.connect(self.mesh)
        self._variants: list[LayerVariants] = layer_variants(built) if len(built) > 1 else [{}]
        return built[0][0]

    @property
    def conversions(self) -> list[list[Decision]]:
        """What becomes of each linear layer, by phase; nothing where no converter of linear layers is named."""
        return [
            conversion_report(converter.decisions for converter in converters if isinstance(converter, LinearConverter))
            for converters in self.converters_by_phase
        ]

    def enter_phase_of(self, step: int) -> bool:
        """Puts the model into the precision in which `step` is computed; whether that is another than before.

        Parameters, their sharding and the optimizer's state stay. What is compiled is compiled anew.
        """
        entered = phase_of(step, self.phases)
        if entered == self.phase:
            return False
        apply_variants(self.model, self._variants[self.phase], self._variants[entered])
        self.phase = entered
        if self.config.training.compile:  # else what does not run any more would count to the limit of recompilations
            torch.compiler.reset()
        return True

    @property
    def converters(self) -> list[ModelConverter]:
        """Of the phase that the model is in."""
        return self.converters_by_phase[self.phase]

    def _conversion_target(self, spec: ModelSpec) -> Target:
        return conversion_target(self.config, spec, self.device, shards=self.dims.fsdp)

    def _materialize(self, model: Any) -> None:
        training = self.config.training
        if not training.enable_cpu_offload:
            check_memory(model, self.config, self.device)
        for stage in self.stages.values():
            stage.to_empty(device="cpu" if training.enable_cpu_offload else self.device.torch_device)
        init_weights(model, model.init_std, training.seed)

    def _split(self, model: Any) -> dict[int, Any]:
        """The stages of the pipeline on this rank by number; the model keeps their modules alone."""
        self.first_layers = self._find_first_layers(model)
        rank, schedule = self.mesh.get_local_rank("pp"), self.config.parallelism.pipeline_parallel_schedule
        numbers = stages_of(rank, self.dims.pp, len(self.first_layers), schedule)
        return split(model, self.first_layers, numbers)

    def _find_first_layers(self, model: Any) -> list[int]:
        return find_first_layers(self.config.parallelism, layer_costs(model, self.config.training.seq_len))

    def _own_positions(self) -> torch.Tensor | None:
        seq_len = self.config.training.seq_len
        if self.context_mesh is not None:
            method = self.config.parallelism.context_parallel_rotate_method
            return own_positions(seq_len, self.context_mesh.get_local_rank(), self.dims.cp, method)
        # A later stage sees no tokens, and under tensor parallelism a part of the sequence.
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

    def run(
        self, microbatches: Sequence[Batch], learning_rate: float, skips: Skips = lambda loss, norm, hidden: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward, update. A trace shows them under these names: forward, backward, optimizer.

        Returns:
            The loss summed over this rank's tokens, for `over_ranks`, and the gradient norm of the whole model before
            clipping; float32 scalars on the device.
        """
        set_learning_rate(self.optimizer, learning_rate)
        total = torch.zeros((), device=self.device.torch_device)
        for number, batch in enumerate(microbatches):
            set_last_microbatch(self.stages.values(), last=number == len(microbatches) - 1)
            total += self._forward_backward(*self._inputs(batch))
        with record_function("optimizer"):
            updated = True
            if self.in_backward is not None:
                grad_norm = self.in_backward.grad_norm()
                skips(total, grad_norm, self._hidden_nonfinite())  # the updates are made: this can report alone
            else:
                grad_norm = clip_grad_norm(self.model.parameters(), self.config.training.max_norm)
                updated = update(self.optimizer, skips(total, grad_norm, self._hidden_nonfinite()))
                self.optimizer.zero_grad()
        self._tell_converters(learning_rate if updated else None)
        return total, grad_norm

    def _hidden_nonfinite(self) -> torch.Tensor | None:
        """Whether this rank's layers have rounded a number to a finite one that is not; None where none can."""
        own = [c.hidden_nonfinite([self.model]) for c in self.converters if isinstance(c, LinearConverter)]
        found = [nonfinite for nonfinite in own if nonfinite is not None]
        return torch.stack(found).any() if found else None

    def _tell_converters(self, learning_rate: float | None) -> None:
        """That an update was made, or, with None, that it is known to be skipped."""
        for converter in self.converters:
            if isinstance(converter, LinearConverter):
                converter.after_step([self.model], learning_rate)
            else:
                converter.post_optimizer_hook([self.model])

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
            with record_function("forward and backward"):
                return self.pipeline.train(tokens, labels, **others)
        with record_function("forward"):
            loss = self.model(tokens, labels, **others)
        with record_function("backward"):
            (loss * self.loss_scale).backward()
        return loss.detach()

    def over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum of a loss over all ranks. Tensor-parallel ranks have the same one; without the last stage it is 0."""
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss / self.dims.tp

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """Mean loss over the tokens of the batches of all ranks; None where the run is to stop before its end."""
        total, tokens = torch.zeros((), device=self.device.torch_device), 0
        for batch in batches:
            if stopping():
                reshard(self.stages.values())
                return None
            inputs, labels, others = self._inputs(batch)
            if self.validation_pipeline is not None:
                total += self.validation_pipeline.evaluate(inputs, labels, **others)
            else:
                total += self.model(inputs, labels, **others)
            tokens += batch.labels.numel()
        reshard(self.stages.values())
        return self.over_ranks(total) / (tokens * self.dims.dp)

    def steps_to_check(self, first_step: int) -> set[int]:
        """The steps, `first_step` the first of them, in which to count low-precision products: the first of each phase
        in which nothing is compiled any more, since products of a compiler's tracing would be counted too."""
        if not any(isinstance(converter, LinearConverter) for phase in self.converters_by_phase for converter in phase):
            return set()
        steps, first = set(), 1
        for phase, converters in zip(self.phases, self.converters_by_phase, strict=True):
            step = max(first_step, first) + self._steps_that_compile(converters)
            if phase.last is None or step <= phase.last:
                steps.add(step)
            first = (phase.last or 0) + 1
        return steps

    def _steps_that_compile(self, converters: Sequence[ModelConverter]) -> int:
        """How many steps from the start of a phase with these may compile something."""
        if not self.config.training.compile:
            return 0
        return 1 + any(isinstance(converter, LinearConverter) and converter.warms_up for converter in converters)

    def converter_state(self) -> dict[str, Any]:
        """What converters keep from step to step, by their names: JSON, of the whole model. Collective."""
        converters = [converter for converter in self.converters if isinstance(converter, LinearConverter)]
        own = {converter.name: converter.state_dict([self.model]) for converter in converters}
        stages: list[Any] = [own]
        if self.dims.pp > 1 and any(state is not None for state in own.values()):
            stages = [None] * self.dims.pp
            dist.all_gather_object(stages, own, group=self.mesh.get_group("pp"))
        return {
            name: {fqn: layer for stage in stages for fqn, layer in stage[name].items()}
            for name, state in own.items()
            if state is not None
        }

    def load_converter_state(self, state: Mapping[str, Any]) -> None:
        """Takes up the `converter_state` of a checkpoint; what it says of other converters is left."""
        for converter in self.converters:
            if isinstance(converter, LinearConverter):
                converter.load_state_dict([self.model], state.get(converter.name, {}))

    def checked_gemms(self, microbatches: int) -> contextlib.AbstractContextManager[None]:
        """Around `run`, in which nothing is compiled any more: low-precision products must run as promised."""
        return checked_gemms(
            self.model,
            self.converters,
            self._passes_of_layers(microbatches),
            compiled=self.config.training.compile,
            recomputed=self.config.activation_checkpoint.mode != "none",
            others=[converter for converters in self.converters_by_phase for converter in converters],
        )

    def _passes_of_layers(self, microbatches: int) -> dict[str, Passes]:
        """How often each module on this rank runs in a step."""
        found = {}
        for number, stage in self.stages.items():
            rounds = Passes(1, 1) if self.pipeline is None else self.pipeline.passes(number)
            for name, _ in stage.named_modules():
                each = self.passes.get(name, 1)
                # What is outside of the blocks, the output layer, has its gradients from the loss in the forward pass.
                backward = rounds.backward if name.startswith("layers.") else rounds.forward
                found[name] = Passes(microbatches * rounds.forward * each, microbatches * backward * each)
        return found
