"""How a Llama is divided: which modules are checkpointed, compiled and sharded, in this order."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Training
from torchtitan.models.llama.model import Llama
from torchtitan.parallel.activation_checkpoint import apply_activation_checkpoint
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.dims import Division
from torchtitan.parallel.fsdp import apply_fsdp

TENSOR_PARALLEL_DIVISIONS: dict[str, Division] = {
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wo": "rowwise",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
    "output": "colwise",
}
"""Megatron's division (arXiv 1909.08053): heads and inner channels over the ranks, and the vocabulary."""


def parallelize(
    model: Llama,
    mesh: DeviceMesh,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    training: Training,
) -> None:
    """Applies activation checkpointing, compile and FSDP in place. The model is still on the meta device."""
    blocks = list(model.layers.values())
    apply_activation_checkpoint(blocks, activation_checkpoint)
    if training.compile:
        apply_compile(blocks, mesh.device_type)
    # A tied embedding is the output layer's weight too and stays with the root.
    groups = blocks if model.args.tied_embeddings else [model.tok_embeddings, *blocks]
    apply_fsdp(
        model,
        groups,
        mesh,
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
        cpu_offload=training.enable_cpu_offload,
    )
