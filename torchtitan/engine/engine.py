"""The engine: one rank's model, optimizer and device mesh. `build_engine` builds it; `train_step` trains it on a batch.

It knows nothing of data sets, checkpoints or metrics: the trainer feeds it, and a plan simulates it.
"""

import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function

from torchtitan.compat.optimizers import fused_step
from torchtitan.config import JobConfig
from torchtitan.converters import ModelConverter, Target
from torchtitan.converters.converter import weight_unchanged
from torchtitan.data import Batch
from torchtitan.device import Device
from torchtitan.engine.conversion import build_converted_model, build_model, conversion_target
from torchtitan.engine.model_args import find_base_args
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models import MODELS
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.combined import optimizers_in
from torchtitan.optim.optimizer import build_optimizer, bytes_of_state, set_learning_rate
from torchtitan.optim.parameters import check_groups
from torchtitan.optim.skip_step import ShouldSkip, Skip
from torchtitan.parallel.dims import Meshes
from torchtitan.parallel.fsdp import set_last_microbatch
from torchtitan.parallel.object_collectives import all_gather_object
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.protocols import Decoder, ModelArgs
from torchtitan.registry import deferred

if TYPE_CHECKING:
    from torchtitan.models.parametrization import ParameterScaling
    from torchtitan.optim.in_backward import StepInBackward
    from torchtitan.parallel.async_tensor import FusedGemms
    from torchtitan.parallel.pipeline import Pipeline

# What a key, a degree of parallelism above 1, or a model with experts switches on.
_mup: Callable[..., "dict[str, ParameterScaling]"] = deferred("torchtitan.models.parametrization:mup")
_own_positions: Callable[..., torch.Tensor] = deferred("torchtitan.parallel.context:own_positions")
_enable_async_tensor_parallel = deferred("torchtitan.parallel.async_tensor:enable_async_tensor_parallel")
_exposed_collectives: Callable[..., str] = deferred("torchtitan.engine.async_gemms:exposed_collectives")
_split_model: Callable[..., tuple[dict[int, Decoder], int]] = deferred("torchtitan.engine.pipelines:split_model")
_build_pipelines: "Callable[..., tuple[Pipeline, Pipeline | None]]" = deferred(
    "torchtitan.engine.pipelines:build_pipelines"
)
_add_router_losses = deferred("torchtitan.models.expert_balance:add_router_losses")
_balance_experts: Callable[..., Mapping[str, torch.Tensor]]
_balance_experts = deferred("torchtitan.models.expert_balance:balance_experts")
_mtp_flops: Callable[..., float] = deferred("torchtitan.models.mtp:mtp_flops")
_StepInBackward = deferred("torchtitan.optim.in_backward:StepInBackward")
_mixtures: Callable[[nn.Module], dict[str, Any]] = deferred("torchtitan.models.moe:mixtures")
_over_counted_tokens: "Callable[[Engine, Sequence[Batch]], Sequence[Batch]]"
_over_counted_tokens = deferred("torchtitan.engine.forward:over_counted_tokens")
_reset_buffers = deferred("torchtitan.models.moe:reset_buffers")
_set_all_to_all_dtype = deferred("torchtitan.models.expert_parallel:set_all_to_all_dtype")


@dataclass(frozen=True)
class FullModel:
    """What is known of the converted model before it is divided among ranks."""

    num_parameters: int
    flops_per_token: float  # forward and backward
    calls: dict[str, int]  # path -> how often a linear layer runs per forward pass, if not once
    scalings: "dict[str, ParameterScaling] | None"  # muP's factors of each parameter, by name; None without muP
    text: str  # for model.print_after_conversion; "" without it

    def init_factor(self, name: str) -> float:
        """The factor on the initial values of a parameter."""
        return 1.0 if self.scalings is None else self.scalings[name].init


@dataclass(frozen=True)
class Engine:
    """What one rank trains with."""

    config: JobConfig
    meshes: Meshes
    device: Device
    model: Decoder  # the modules on this rank, under their names in the full model
    pipeline_stages: dict[int, Decoder]  # number -> view of the model; {0: model} without a pipeline
    positions: torch.Tensor | None  # ids, within each sequence, of the tokens this rank computes; None for all of them
    converters: list[ModelConverter]
    optimizer: torch.optim.Optimizer  # for this rank's parameters
    step_in_backward: "StepInBackward | None"  # steps the optimizer in the backward pass; None if it steps afterwards
    pipeline: "Pipeline | None"  # runs the stages; None without a pipeline
    validation_pipeline: "Pipeline | None"  # None also without validation and evaluation
    fused_gemms: "FusedGemms | None"  # compiler pass of asynchronous tensor parallelism; None without it
    loss_scale: float  # factor applied to the summed loss of a micro-batch before the backward pass
    full: FullModel
    # The last step's statistics, from `balance_experts`.
    expert_statistics: dict[str, torch.Tensor] = field(default_factory=dict)


def build_engine(
    config: JobConfig,
    meshes: Meshes,
    device: Device,
    args: ModelArgs,
    global_batch_size: int,  # sequences per optimizer step
    *,
    target: Target | None = None,  # where low-precision layers will run; default: this device
    first_layers: Sequence[int] | None = None,  # the first layer of each pipeline stage; default: split as configured
    # Allocates the parameters; default: `allocate_shards`. A plan allocates fake ones.
    allocate: Callable[[Decoder, Sequence[Decoder], JobConfig, Device], None] | None = None,
) -> Engine:
    """Builds the engine from a checked configuration, top to bottom; its weights are uninitialized. Raises a
    ConfigError if a converter does not fit the model or device, or the model does not fit into memory. Collective."""
    dims, mesh, training = meshes.dims, meshes.mesh, config.training
    spec, fused_gemms = MODELS.get(config.model.name), None
    if config.parallelism.enable_async_tensor_parallel and dims.tp > 1:
        fused_gemms = _enable_async_tensor_parallel(mesh["tp"])

    # The full model on the meta device, then converters: they see unwrapped layers under their original names.
    target = target or conversion_target(config, spec, device, shards=dims.fsdp)
    model, converters = build_converted_model(config, args, target, mesh)
    if fused_gemms is not None and (remark := _exposed_collectives(config, converters)):
        logger.warning(remark)
    check_groups(model, config.optimizer)
    full = _describe(model, config, args, target)

    # Split into pipeline stages; then in each, tensor and context parallelism, activation checkpointing, compile, FSDP.
    stages, stage_count = {0: model}, 1
    if dims.pp > 1:
        stages, stage_count = _split_model(model, config, meshes, first_layers)
    positions = _position_ids(config, meshes, device)
    # The loss is the mean over the tokens of the global batch. FSDP averages gradients over its ranks, and gradients of
    # micro-batches are summed; so a rank's summed loss is scaled by the number of those ranks over all tokens.
    loss_scale = dims.dp_replicate * dims.fsdp / (global_batch_size * training.seq_len)
    if training.z_loss_coefficient is not None and not hasattr(model, "z_loss"):
        raise ConfigError(f"training.z_loss_coefficient: {config.model.name} computes a loss of its own; unset it.")
    if args.moe is not None:
        groups = [
            ranks.get_group().group_name for ranks in (meshes.context_mesh, mesh["tp"]) if ranks and ranks.size() > 1
        ]
        _add_router_losses(model, config.moe, loss_scale, training.seq_len, groups)
    sections = config.parallelism, config.activation_checkpoint, training
    for stage in stages.values():
        stage.positions, stage.z_loss = positions, training.z_loss_coefficient
        spec.parallelize(stage, spec.sharding, mesh, meshes.context_mesh, meshes.expert_mesh, *sections)
    if args.moe is not None:
        _set_all_to_all_dtype(model, config.moe.all_to_all_dtype)
    (allocate or allocate_shards)(model, list(stages.values()), config, device)

    pipeline = validation_pipeline = None
    if dims.pp > 1:
        built = _build_pipelines(config, meshes, device, args, stages, stage_count, loss_scale)
        pipeline, validation_pipeline = built

    # Muon orthogonalizes in the dtype of the model's GEMMs.
    dtype, section_of = getattr(torch, training.mixed_precision_param), functools.partial(getattr, config)
    optimizer = build_optimizer(model, config.optimizer, training.seed, section_of, dtype, full.scalings)
    early = config.optimizer.early_step_in_backward
    return Engine(
        config=config,
        meshes=meshes,
        device=device,
        model=model,
        pipeline_stages=stages,
        positions=positions,
        converters=converters,
        optimizer=optimizer,
        step_in_backward=_StepInBackward(model.parameters(), optimizer) if early else None,
        pipeline=pipeline,
        validation_pipeline=validation_pipeline,
        fused_gemms=fused_gemms,
        loss_scale=loss_scale,
        full=full,
    )


def train_step(
    engine: Engine,
    microbatches: Sequence[Batch],
    learning_rate: float,
    should_skip: ShouldSkip | None = None,
    step: int = 0,
    run_pass: Callable[[Engine, Batch], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains on one global batch: a micro-batch per grad-accumulation step, then one optimizer step. A profiler trace
    labels them "forward", "backward" and "optimizer". `run_pass` wraps `forward_backward`, for a plan that measures it.

    Returns this rank's loss, summed over its tokens (see `sum_over_ranks`), and the gradient norm of the full model
    before clipping: float32 scalars on the device. This does not wait for the device, unless `should_skip` does or the
    optimizer is not fused.
    """
    set_learning_rate(engine.optimizer, learning_rate)
    if engine.config.training.train_on is not None:
        microbatches = _over_counted_tokens(engine, microbatches)
    loss = torch.zeros((), device=engine.device.torch_device)
    with weight_unchanged(engine.model.output):
        for number, batch in enumerate(microbatches):
            set_last_microbatch(engine.pipeline_stages.values(), last=number == len(microbatches) - 1)
            loss += (run_pass or forward_backward)(engine, batch)

    with record_function("optimizer"):
        if engine.step_in_backward is None:
            max_norm = engine.config.training.max_norm
            grad_norm = clip_grad_norm(engine.model.parameters(), max_norm, engine.optimizer)
        else:
            grad_norm = engine.step_in_backward.grad_norm()

        skip = Skip()
        if should_skip is not None:
            skip = should_skip(step, loss, grad_norm, _saturated_nonfinite(engine), sample_ids(microbatches))
        if engine.step_in_backward is None:  # else the parameters are already updated
            skip = optimizer_step(engine.optimizer, skip)
            # model.zero_grad(), because an optimizer need not own every parameter.
            engine.model.zero_grad()
        else:
            engine.step_in_backward.update_averages()

    after_optimizer_step(engine, learning_rate, skip)
    if engine.model.args.moe is not None:
        seen = _balance_experts(engine.model, engine.meshes.mesh, engine.config.moe, skip.device)
        engine.expert_statistics.update(seen)
    return loss, grad_norm


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Skip) -> Skip:
    """Runs the optimizer step unless it is skipped. Returns `skip`, with what the host knows now. Fused optimizers,
    torch's and on GPUs our own, read the decision on the device (as `found_inf`, meant for gradient scaling). For
    others the host must read it, which waits for the device."""
    flag = skip.device
    for single in optimizers_in(optimizer):
        if flag is not None and single.defaults.get("fused"):
            # Under CPU offload the update runs on the host, so this waits for the flag.
            device = next(parameter.device for group in single.param_groups for parameter in group["params"])
            fused_step(single, flag.to(device))
        elif flag is not None and flag.item() > 0:
            skip = Skip(flag, host=True)
        else:
            single.step()
    return skip


def forward_backward(engine: Engine, batch: Batch) -> torch.Tensor:
    """Accumulates gradients. Returns the loss, summed over the tokens of the micro-batch."""
    tokens, labels, inputs = on_device(engine, batch)
    if engine.pipeline is not None:
        with record_function("forward and backward"):
            return engine.pipeline.run(tokens, labels, batch.factor, **inputs)
    with record_function("forward"):
        loss = engine.model(tokens, labels, **inputs)
    with record_function("backward"):
        (loss * (engine.loss_scale * batch.factor)).backward()
    return loss.detach()


def on_device(engine: Engine, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens and labels (rows, positions on this rank), and the model's other inputs by name."""
    move = functools.partial(torch.Tensor.to, device=engine.device.torch_device, non_blocking=True)
    along = {"tokens": move(batch.tokens), "labels": move(batch.labels), **{k: move(v) for k, v in batch.mtp.items()}}
    if engine.meshes.context_mesh is not None:
        along = {name: tensor[..., engine.positions] for name, tensor in along.items()}
    inputs = {} if batch.document_ids is None else {"document_ids": move(batch.document_ids)}
    return along.pop("tokens"), along.pop("labels"), {**inputs, **along}


def sample_ids(microbatches: Sequence[Batch]) -> list[str]:
    """Sample ids of the documents in these micro-batches; a document in two rows appears twice."""
    return [sample for batch in microbatches for row in batch.sample_ids or [] for sample in row]


def after_optimizer_step(engine: Engine, learning_rate: float, skip: Skip) -> None:
    """Calls the converters' hooks."""
    for converter in engine.converters:
        converter.after_step([engine.model], None if skip.host else learning_rate, skip.device)


def _saturated_nonfinite(engine: Engine) -> torch.Tensor | None:
    """Whether a low-precision layer on this rank has made an infinity or NaN finite, which hides it from loss and
    gradients: a bool on the device. None if no layer can do so."""
    flags = [converter.hidden_nonfinite([engine.model]) for converter in engine.converters]
    known = [flag for flag in flags if flag is not None]
    return torch.stack(known).any() if known else None


def _describe(model: Decoder, config: JobConfig, args: ModelArgs, target: Target) -> FullModel:
    num_parameters, scalings = sum(parameter.numel() for parameter in model.parameters()), None
    multiplied, seq_len = num_parameters - _unused_parameters(model), config.training.seq_len
    if config.model.parametrization == "mup":
        with torch.device("meta"):
            scalings = _mup(model, build_model(config, find_base_args(config.model, args)))
    return FullModel(
        num_parameters,
        flops_per_token(multiplied, args, seq_len) + (_mtp_flops(model, seq_len) if config.training.mtp_layers else 0),
        calls=getattr(model, "passes", lambda tokens: {})(target.tokens),
        scalings=scalings,
        text=str(model) if config.model.print_after_conversion else "",
    )


def _unused_parameters(model: Decoder) -> int:
    """The number of parameters that a token is not multiplied by: of the embedding, and of experts not chosen."""
    embedding = None if model.args.tied_embeddings else model.tok_embeddings
    experts = 0 if model.args.moe is None else sum(each.unused_parameters for each in _mixtures(model).values())
    return experts + (0 if embedding is None else embedding.weight.numel())


def _position_ids(config: JobConfig, meshes: Meshes, device: Device) -> torch.Tensor | None:
    seq_len = config.training.seq_len
    if meshes.context_mesh is not None:
        method = config.parallelism.context_parallel_rotate_method
        ids = _own_positions(seq_len, meshes.context_mesh.get_local_rank(), meshes.dims.cp, method)
    elif meshes.dims.pp > 1:  # a later stage sees no tokens, and under tensor parallelism only part of the sequence
        ids = torch.arange(seq_len)
    else:
        return None
    return ids.to(device.torch_device)


def allocate_shards(model: Decoder, stages: Sequence[Decoder], config: JobConfig, device: Device) -> None:
    """Allocates this rank's shards, uninitialized but for the buffers of mixtures of experts."""
    offload = config.training.enable_cpu_offload
    if not offload:
        _check_memory(model, config, device)
    for stage in stages:
        stage.to_empty(device="cpu" if offload else device.torch_device)
        for module in stage.modules() if offload else ():  # FSDP gathers parameters onto the device, but no buffers
            module._buffers.update(
                {name: buffer.to(device.torch_device) for name, buffer in module.named_buffers(recurse=False)}
            )
    if any(True for _ in model.buffers()):
        _reset_buffers(model)


def _state_bytes(model: nn.Module, config: JobConfig) -> float:
    """Lower bound of what this rank holds throughout training. The model may be on the meta device."""
    copies = 1 if config.optimizer.early_step_in_backward else 2  # the weight, and its gradient
    state = bytes_of_state(config.optimizer)
    return sum(local_tensor(each).numel() * (each.element_size() * copies + state) for each in model.parameters())


def _check_memory(model: nn.Module, config: JobConfig, device: Device) -> None:
    """Raises a ConfigError, the same on every rank, if any machine or GPU has too little memory. Collective."""
    place = (socket.gethostname(), device.torch_device.index if device.type == "cuda" else None)
    ranks = all_gather_object((place, _state_bytes(model, config), device.memory_capacity_bytes()))
    for where in {place for place, _, _ in ranks}:
        need = sum(size for place, size, _ in ranks if place == where)
        capacity = min(size for place, _, size in ranks if place == where)
        if need > capacity:
            noun = "GPU" if device.type == "cuda" else "machine"
            raise ConfigError(
                f"model.flavor = {config.model.flavor}: weights, gradients and optimizer state alone need "
                f"{need / 2**30:,.0f} GiB on one {noun}, which has {capacity / 2**30:,.0f} GiB; use a smaller flavor, "
                f"more {noun}s, or smaller states (training.weight_dtype, optimizer.name = AdamW8bit). "
                "--job.plan estimates the memory of a run."
            )
