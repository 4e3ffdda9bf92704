"""INT8 all-gather for FSDP2: shards are sent as int8 data with float32 scales, half the bytes of bf16.

For sharded weights that define them, FSDP2 calls `fsdp_pre_all_gather` for the tensors to send, and
`fsdp_post_all_gather` to build the full weight. A shard consists of full rows, so row scales need no communication. A
tensorwise scale needs a reduction over the shards: one for all weights after each optimizer step
(`set_tensorwise_scales`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torchtitan.compat.dispatch import pytree
from torchtitan.kernels.quantize import (
    LARGEST,
    SMALLEST_SCALE,
    ScaleRecipe,
    dequantize,
    quantize,
    quantize_with,
)
from torchtitan.kernels.quantized import Quantized

aten = torch.ops.aten
# Operations of FSDP2, initialization and optimizers on a sharded weight whose result must be a sharded weight again.
KEEP_TYPE = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.chunk.default,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.clone.default,
}


class ShardedWeight(torch.Tensor):
    """A high-precision weight, or a shard of one, that FSDP gathers in int8.

    Args:
        tensor: (rows, columns).
        recipe: layout of the scales.
    """

    tensor: torch.Tensor
    recipe: ScaleRecipe
    scale_inverse: torch.Tensor | None
    """(1, 1): tensorwise scale inverse for the next gather, if already computed."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, recipe: str) -> "ShardedWeight":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: torch.Tensor, recipe: ScaleRecipe) -> None:
        self.tensor = tensor
        self.recipe = recipe
        self.scale_inverse = None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.tensor}, {self.recipe})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recipes = {leaf.recipe for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)}
        args, kwargs = pytree.tree_map_only(cls, lambda weight: weight.tensor, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func is aten.copy_.default or func not in KEEP_TYPE:
            return out
        (recipe,) = recipes
        return pytree.tree_map_only(torch.Tensor, lambda tensor: cls(tensor, recipe), out)

    def __tensor_flatten__(self) -> tuple[list[str], ScaleRecipe]:
        return ["tensor"], self.recipe

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], recipe: ScaleRecipe, outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> "ShardedWeight":
        return ShardedWeight(inner["tensor"], recipe)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """((int8 data, scale inverses), metadata) of this shard; a tensorwise scale is sent as metadata."""
        if self.recipe == "rowwise":
            data, scale_inverse = quantize(self.tensor, "rowwise")
            # On one rank, FSDP2 copies only the first tensor, and the scales need no gathering.
            return ((data,), scale_inverse) if mesh.size() == 1 else ((data, scale_inverse), None)
        if self.scale_inverse is None:  # before the first optimizer step
            self.scale_inverse = tensorwise_scale(self.tensor.abs().amax().float(), mesh).view(1, 1)
        scale_inverse = self.scale_inverse.clone()  # belongs to this data, even if the weight's scale changes later
        return (quantize_with(self.tensor, scale_inverse),), scale_inverse

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        scale_inverse: torch.Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> "tuple[GatheredWeight, tuple[torch.Tensor, ...]] | None":
        """The full weight, and the tensors whose memory FSDP2 frees after use."""
        if out is None:
            scale_inverse = outputs[1] if scale_inverse is None else scale_inverse
            return GatheredWeight(Quantized(outputs[0], scale_inverse), param_dtype), outputs
        # FSDP2 refilled the same memory. Tensors saved for the backward pass refer to it, so refill the scale as well.
        weight: GatheredWeight = out._local_tensor if isinstance(out, DTensor) else out  # type: ignore[assignment]
        if scale_inverse is not None:
            weight.scale_inverse.data.copy_(scale_inverse)  # .data hides the write from autograd, as FSDP2 does
        return None


class GatheredWeight(torch.Tensor):
    """A full weight in int8, (rows, columns), with its scale inverse, (rows, 1) or (1, 1).

    To autograd it has the high-precision `dtype`; only `Int8Matmul` multiplies by its int8 data.
    """

    data_int8: torch.Tensor
    scale_inverse: torch.Tensor

    @staticmethod
    def __new__(cls, quantized: Quantized, dtype: torch.dtype) -> "GatheredWeight":
        data = quantized.data
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, quantized: Quantized, dtype: torch.dtype) -> None:
        self.data_int8, self.scale_inverse = quantized

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({self.quantized()})"

    def quantized(self) -> Quantized:
        return Quantized(self.data_int8, self.scale_inverse)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # FSDP2 calls as_strided with the weight's own shape and strides, DTensor.to_local() view with its own shape.
        same = func is aten.view.default and list(args[1]) == list(args[0].shape)
        if same or func in (aten.detach.default, aten.alias.default, aten.as_strided.default):
            return cls(args[0].quantized(), args[0].dtype)
        # Any other operation gets the weight in high precision.
        args, kwargs = pytree.tree_map_only(cls, lambda weight: weight.dequantize_all(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def dequantize_all(self) -> torch.Tensor:
        return dequantize(self.data_int8, self.scale_inverse, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data_int8", "scale_inverse"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> "GatheredWeight":
        return GatheredWeight(Quantized(inner["data_int8"], inner["scale_inverse"]), dtype)


def tensorwise_scale(amax: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Tensorwise scale inverses from the largest magnitudes of the shards."""
    if mesh.size() > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return (amax / LARGEST).clamp_min(SMALLEST_SCALE)


@torch.no_grad()
def set_tensorwise_scales(models: Sequence[nn.Module]) -> None:
    """Computes the scales of all weights that are gathered tensorwise, in one reduction."""
    sharded = [
        (parameter.device_mesh, parameter._local_tensor)
        for model in models
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, ShardedWeight)
    ]
    if not sharded:
        return
    mesh = sharded[0][0]["fsdp"]  # not over tensor-parallel ranks: each has its own matrix with its own scale
    amax = torch.stack([weight.tensor.abs().amax().float() for _, weight in sharded])
    for (_, weight), scale in zip(sharded, tensorwise_scale(amax, mesh), strict=True):
        weight.scale_inverse = scale.view(1, 1)
