"""Tensor parallelism (Megatron, arXiv 1909.08053) with sequence parallelism (arXiv 2205.05198).

Weights become DTensors, so that FSDP, checkpoints and initialization know which shard a rank holds. A module's forward
sees its local shard as a plain tensor, and the collectives run in hooks at block boundaries. So torch, converters and
the compiler see a smaller model on one device in between.

Shapes: B batch, S sequence, D channels.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.kernels.operator import Function
from torchtitan.parallel.collectives import all_gather, all_reduce, all_reduce_no_grad, reduce_scatter
from torchtitan.parallel.dims import Style, style_of

SEQUENCE = 1  # dimension of activations, (B, S, D)


AllGather = Callable[[torch.Tensor, int, str], torch.Tensor]
"""(tensor, dimension, group name), like `collectives.all_gather`."""


def apply_tensor_parallel(
    model: nn.Module,
    sharding: Mapping[str, Style],
    mesh: DeviceMesh,
    collectives_for: Callable[[Sequence[nn.Module]], tuple[AllGather, AllGather]] = lambda linears: (
        all_gather,
        reduce_scatter,
    ),
    flatten: bool = False,
) -> None:
    """Shards the modules that `sharding` names, in place. The model is on the meta device.

    Args:
        sharding: maps the end of a module's path to a style:
            "embedding": shards the vocabulary; the output is sharded along the sequence.
            "sequence": works on sequence shards, with the full weight (a norm, or a linear layer).
            "sequence_gather": "sequence", then all-gathers the output along the sequence.
            "heads": works on the heads of a rank, with the full weight (a norm over a head's channels).
            "gather": all-gathers the input along the sequence for its children; attention's own sinks are sharded
                by heads.
            "colwise": shards the outputs of a linear layer.
            "gather_colwise": "colwise", after an all-gather of the input along the sequence.
            "colwise_norm": shards the channels of an RMSNorm over such outputs.
            "rowwise": shards its inputs; reduce-scatters the output along the sequence, and then adds the bias.
        collectives_for: chooses how to all-gather the input of these colwise layers, and to reduce-scatter the output
            of a rowwise one.
        flatten: shard several sequences as if they were one: a rank with a part of each has to sort what it sends and
            receives, and between collectives no module asks where a token is.
    """
    group = mesh.get_group().group_name
    along = functools.partial(_along_tokens, group=group, flatten=flatten)
    for name, module in model.named_modules():
        match style_of(name, sharding):
            case "embedding":
                shard_parameters(module, {"weight": Shard(0)}, mesh)
                module.forward = functools.partial(_embed_own_tokens, module, mesh.get_local_rank(), along)
            case "sequence" | "heads":
                shard_parameters(module, {"weight": Replicate(), "bias": Replicate()}, mesh)
            case "sequence_gather":
                shard_parameters(module, {"weight": Replicate()}, mesh)
                module.register_forward_hook(lambda module, inputs, out: along(all_gather, out))
            case "gather":
                linears = [
                    child for end, child in module.named_children() if style_of(f"{name}.{end}", sharding) == "colwise"
                ]
                gather, _ = collectives_for(linears)
                shard_parameters(module, {"sinks": Shard(0)}, mesh)
                module.register_forward_pre_hook(_gather_inputs(functools.partial(along, gather)))
            case "colwise" | "gather_colwise" as style:
                if style == "gather_colwise":
                    gather, _ = collectives_for([module])
                    module.register_forward_pre_hook(_gather_inputs(functools.partial(along, gather)))
                shard_parameters(module, {"weight": Shard(0), "bias": Shard(0)}, mesh)
            case "colwise_norm":
                shard_parameters(module, {"weight": Shard(0)}, mesh)
                module.forward = functools.partial(_normalize_own_channels, module, group)
            case "rowwise":
                shard_parameters(module, {"weight": Shard(1), "bias": Replicate()}, mesh)
                _, scatter = collectives_for([module])
                if "bias" in dict(module.named_parameters(recurse=False)):
                    module.__class__ = _without_bias(type(module))  # type: ignore[arg-type]  # mypy: not hashable
                module.register_forward_hook(_scatter_output(functools.partial(along, scatter)))


def _gather_inputs(gather: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A forward pre-hook that all-gathers a module's input for its children."""
    return lambda module, inputs: (gather(inputs[0]), *inputs[1:])


def _scatter_output(scatter: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A forward hook that reduce-scatters a module's output, and adds the bias that its forward did not see."""

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = getattr(module, "bias_of_sum", None)
        return scatter(out) if bias is None else scatter(out) + bias

    return hook


def _along_tokens(collective: AllGather, x: torch.Tensor, group: str, flatten: bool) -> torch.Tensor:
    """`collective` of (B, S, D) along the sequence, or along all tokens."""
    if x.shape[0] > 1 and not flatten:
        return collective(x, SEQUENCE, group)
    tokens: torch.Tensor = collective(x.flatten(0, 1), 0, group).unflatten(0, (x.shape[0], -1))
    return tokens


def shard_parameters(module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Replaces the module's parameters with DTensors; its forward sees their local shards. Raises a NotImplementedError
    for a parameter without a placement."""
    views = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name not in placements:
            raise NotImplementedError(f"tensor parallelism does not support the parameter {name} of {module}")
        placement = placements[name]
        local = parameter.data
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
        full = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        module.register_parameter(name, nn.Parameter(full, requires_grad=parameter.requires_grad))
        # The gradient of a full weight on a shard of the sequence or of the heads is a partial sum.
        views.append((name, placement, mesh.get_group().group_name if isinstance(placement, Replicate) else None))
    if views:
        module.__class__ = _with_local_views(type(module), tuple(views))  # type: ignore[arg-type]  # mypy: not hashable


class _SumGradients(Function):
    """The identity, with a float32 all-reduce in the backward pass. (DTensor would use the gradient's dtype.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_no_grad(grad.float(), ctx.group).to(grad.dtype), None


def _local_shard(name: str, placement: Placement, group: str | None) -> property:
    """A property that returns the parameter's local shard, whose gradient is summed over the ranks of the group; the
    parameter itself stays registered under its name."""

    def local(self: nn.Module) -> torch.Tensor:
        parameter: DTensor = self._parameters[name]  # type: ignore[assignment]  # of `shard_parameters`
        # For the forward pass FSDP replaces the parameter with the gathered one, which is sharded over `mesh` alone.
        if parameter.device_mesh.ndim > 1:
            return parameter
        shard = parameter.to_local(grad_placements=[placement])
        return shard if group is None else _SumGradients.apply(shard, group)

    return property(local)


@functools.cache  # one class for identical modules, so that one layer's compiled code serves all
def _with_local_views(cls: type[nn.Module], views: tuple[tuple[str, Placement, str | None], ...]) -> type[nn.Module]:
    """A subclass whose attributes are the local shards of these parameters, as in `torch.nn.utils.parametrize`."""
    return type(cls.__name__, (cls,), {view[0]: _local_shard(*view) for view in views})


@functools.cache
def _without_bias(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of one with local views whose forward sees no bias, which every rank would add to its part."""

    def seen(self: nn.Module) -> nn.Parameter | None:
        parameter: Any = self._parameters["bias"]
        return parameter if parameter.device_mesh.ndim > 1 else None  # FSDP asks for the sharded one

    return type(cls.__name__, (cls,), {"bias": property(seen), "bias_of_sum": vars(cls)["bias"]})


def _embed_own_tokens(
    module: nn.Module, rank: int, along: Callable[[AllGather, torch.Tensor], torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Forward of an embedding that holds a vocabulary shard."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    rows = tokens - rank * weight.shape[0]
    is_local = (rows >= 0) & (rows < weight.shape[0])
    out = along(reduce_scatter, F.embedding(rows.where(is_local, 0), weight) * is_local.unsqueeze(-1))
    return out if out._base is None else out.clone()  # FSDP warns of views


def _normalize_own_channels(norm: Any, group: str, x: torch.Tensor) -> torch.Tensor:
    """Forward of an RMSNorm that holds some of the channels, (B, S, channels of this rank), and their weights. Like
    `models.norm.RMSNorm`, but the mean square is that of the channels of all ranks."""
    dtype = torch.promote_types(x.dtype, norm.weight.dtype)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    squares = all_reduce(wide.square().sum(-1, keepdim=True), group)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    normal = wide * (squares / norm.normalized_shape[0] + eps).rsqrt()
    out: torch.Tensor = (normal * (norm.weight + norm.offset)).to(dtype)
    return out
