"""Parallelizes a decoder: tensor and context parallelism, activation checkpointing, compile and FSDP, in this order."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Training
from torchtitan.models.transformer import Transformer, attentions
from torchtitan.parallel.dims import Style
from torchtitan.parallel.fsdp import Group, apply_fsdp, require_parts
from torchtitan.registry import deferred

# What a key, or a degree of parallelism above 1, switches on.
_apply_activation_checkpoint = deferred("torchtitan.parallel.activation_checkpoint:apply_activation_checkpoint")
_apply_compile = deferred("torchtitan.parallel.compile:apply_compile")
_shard_tensors = deferred("torchtitan.models.tensor_parallel:shard_tensors")
_spread_experts = deferred("torchtitan.models.expert_parallel:spread_experts")
_gather_with_block = deferred("torchtitan.parallel.expert:gather_with_block")
_save_in_8_bits = deferred("torchtitan.models.saved_activations:save_in_8_bits")
_context_parallel_attention = deferred("torchtitan.parallel.context:context_parallel_attention")

SHARDING: dict[str, Style] = {
    "tok_embeddings": "embedding",
    "attention_norm": "sequence",
    "attention": "gather",
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wg": "colwise",
    "attention.wo": "rowwise",
    "attention.q_norm": "heads",
    "attention.k_norm": "heads",
    "attention_post_norm": "sequence",
    "ffn_norm": "sequence",
    "feed_forward": "gather",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
    "ffn_post_norm": "sequence",
    "moe.router.gate": "sequence",
    "moe.shared_experts": "gather",
    "moe.shared_experts.w1": "colwise",
    "moe.shared_experts.w3": "colwise",
    "moe.shared_experts.w2": "rowwise",
    "norm": "sequence_gather",
    "output": "colwise",
}
"""As in Megatron, heads, inner channels and the vocabulary are sharded over the ranks (arXiv 1909.08053); in between,
activations are sharded along the sequence (arXiv 2205.05198)."""


def parallelize(
    model: Transformer,
    sharding: Mapping[str, Style],
    mesh: DeviceMesh,
    context_mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    training: Training,
) -> None:
    """Parallelizes the model, or a stage of it, in place. It is still on the meta device. `sharding` is the family's,
    such as `SHARDING`; the meshes are as in `dims.Meshes`."""
    require_parts(model)
    by_number = dict(model.layers.items())
    further: Mapping[str, nn.Module] = getattr(model, "mtp", None) or {}  # layers of multi-token prediction
    by_number |= {str(model.args.n_layers + int(depth)): layer.block for depth, layer in further.items()}  # type: ignore[misc]
    blocks = list(by_number.values())
    tensor_mesh = mesh["tp"]
    if tensor_mesh.size() > 1:
        _shard_tensors(model, sharding, tensor_mesh, parallelism)
    if context_mesh is not None:
        kernel = _context_parallel_attention(context_mesh, parallelism.context_parallel_rotate_method)
        for module in attentions(by_number, "parallelism.context_parallel_degree above 1"):
            module.use(kernel)
    experts = [] if expert_mesh is None else _spread_experts(blocks, expert_mesh, tensor_mesh.size())
    if activation_checkpoint.mode != "none":
        _apply_activation_checkpoint(by_number, activation_checkpoint)
    if activation_checkpoint.swiglu_dtype is not None:
        _save_in_8_bits(blocks, activation_checkpoint.swiglu_dtype)
    if training.compile:
        _apply_compile(blocks, mesh.device_type)
    for block, module in experts:
        _gather_with_block(block, module)
    groups, keep_last = _fsdp_groups(model, [*model.layers.values(), *further.values()])
    keep_last += int(mesh["pp"].size() == 1)  # in a pipeline others of its micro-batches come in between
    apply_fsdp(
        model,
        groups,
        _data_parallel(mesh),
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard_after_forward=_reshards_after_forward(parallelism, mesh),
        cpu_offload=training.enable_cpu_offload,
        experts=[module for _, module in experts],
        expert_mesh=None if expert_mesh is None else _data_parallel(expert_mesh),
        keep_last=keep_last,
    )
    embedding = model.tok_embeddings
    if isinstance(embedding, FSDPModule) and type(embedding).forward is nn.Embedding.forward:
        embedding.set_unshard_in_backward(False)  # its gradient is a sum of rows of the output's
        embedding.set_modules_to_backward_prefetch([embedding])  # else the head, as if another backward pass followed


def _reshards_after_forward(parallelism: Parallelism, mesh: DeviceMesh) -> bool:
    """By default not with a pipeline, where gathering again for each of its micro-batches would cost more than it
    saves, nor with a single shard, where "gathering" only casts it."""
    policy = parallelism.fsdp_reshard_after_forward
    return policy == "always" or (policy == "default" and mesh["pp"].size() == 1 and mesh["fsdp"].size() > 1)


def _fsdp_groups(model: Transformer, layers: Sequence[nn.Module]) -> tuple[list[nn.Module], int]:
    """The modules whose weights are gathered together, in order, and whether the last one is the head."""
    groups = list(layers)
    embedding, norm, output = model.tok_embeddings, model.norm, model.output
    if model.args.tied_embeddings:  # the output layer has the same weight, and both stay in the root
        return groups, 0
    if embedding is not None:
        groups.insert(0, embedding)
    runs_head = type(model).forward is Transformer.forward or hasattr(model, "mtp")
    if norm is None or output is None or not runs_head:
        return groups, 0
    model.head_group = Group(model.head, [norm, output])
    model.head = model.head_group.__call__  # type: ignore[method-assign]
    return [*groups, model.head_group], 1


def _data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """(fsdp,), or (dp_replicate, fsdp) with replicas."""
    return mesh["dp_replicate", "fsdp"] if mesh["dp_replicate"].size() > 1 else mesh["fsdp"]
