"""Pipelines of a run: the model split into stages, and what runs them."""

import functools
from collections.abc import Sequence

import torch

from torchtitan.config import JobConfig
from torchtitan.device import Device
from torchtitan.parallel.dims import Meshes
from torchtitan.parallel.pipeline import (
    Pipeline,
    find_first_layers,
    layer_costs,
    pipeline_stage_numbers,
    split_pipeline_stages,
)
from torchtitan.protocols import Decoder, ModelArgs


def split_model(
    model: Decoder, config: JobConfig, meshes: Meshes, first_layers: Sequence[int] | None
) -> tuple[dict[int, Decoder], int]:
    """This rank's pipeline stages by number, and the number of all."""
    if first_layers is None:
        first_layers = find_first_layers(config.parallelism, layer_costs(model, config.training.seq_len))
    schedule, count = config.parallelism.pipeline_parallel_schedule, len(first_layers)
    numbers = pipeline_stage_numbers(meshes.mesh.get_local_rank("pp"), meshes.dims.pp, count, schedule)
    return split_pipeline_stages(model, first_layers, numbers), count


def build_pipelines(
    config: JobConfig,
    meshes: Meshes,
    device: Device,
    args: ModelArgs,
    stages: dict[int, Decoder],
    stage_count: int,
    loss_scale: float,
) -> tuple[Pipeline, Pipeline | None]:
    """The pipelines of training and of validation; None without validation and evaluation."""
    training, parallelism, validation = config.training, config.parallelism, config.validation
    rows, seq_len = parallelism.pipeline_parallel_microbatch_size, training.seq_len // meshes.dims.cp
    dtype = getattr(torch, training.mixed_precision_param)
    # The embeddings of the tokens that `models.mtp` reads travel with the hidden states.
    further = rows * training.mtp_layers
    build = functools.partial(
        Pipeline,
        stages,
        stage_count,
        meshes.mesh.get_group("pp"),
        parallelism,
        device.torch_device,
        tokens=torch.empty(rows, seq_len, dtype=torch.int64, device="meta"),
    )
    hidden = torch.empty(rows + further, seq_len // meshes.dims.tp, args.dim, dtype=dtype, device="meta")
    pipeline = build(hidden=hidden, microbatches=training.local_batch_size // rows, scale=loss_scale)
    if not validation.enabled and not config.evaluation.tasks:
        return pipeline, None
    return pipeline, build(hidden=hidden[:rows], microbatches=validation.local_batch_size // rows, forward_only=True)
