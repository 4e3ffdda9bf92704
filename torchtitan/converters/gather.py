"""Tensors that are gathered in 8 bits: weights by FSDP2, activations and gradients by tensor parallelism.

INT8 all-gather for FSDP2: shards are sent as int8 data with float32 scales, half the bytes of bf16. A weight that is
not sharded is quantized for both GEMMs that use it, once a step.

For sharded weights that define them, FSDP2 calls `fsdp_pre_all_gather` for the tensors to send, and
`fsdp_post_all_gather` to build the full weight. A shard consists of full rows, or of experts, so row scales need no
communication. A tensorwise scale needs a reduction over the shards: one for all weights after each optimizer step
(`set_tensorwise_scales`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torchtitan.compat.dispatch import pytree
from torchtitan.device import keep_for_current_stream
from torchtitan.kernels.grouped_8bit import round_experts, round_matrix
from torchtitan.kernels.grouped_gemm import grouped_mm_over_rows
from torchtitan.kernels.matmul_8bit import as_right
from torchtitan.kernels.operator import fused
from torchtitan.kernels.quantize import LARGEST, Quantized, ScaleRecipe, dequantize, quantize, quantize_with
from torchtitan.kernels.rounding import SMALLEST_SCALE
from torchtitan.parallel.collectives import all_gather_matmul, all_gather_no_grad

aten = torch.ops.aten
# Operations of FSDP2, initialization and optimizers on a sharded weight whose result must be a sharded weight again, as
# that of every view must be: FSDP would gather another tensor in high precision without a word.
KEEP_TYPE = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.clone.default,
}


class ShardedWeight(torch.Tensor):
    """A high-precision weight, (rows, columns) or (experts, rows, columns), or a shard of one along the first
    dimension, that FSDP gathers in int8 with scales as `recipe` says; of experts, rowwise."""

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
        if func is aten.view.dtype or not (func.is_view or func in KEEP_TYPE):  # type: ignore[attr-defined]
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
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """((int8 data, scale inverses), metadata) of this shard. What needs no gathering is metadata: a tensorwise
        scale; on one rank all but the data, of which FSDP2 copies only the first tensor."""
        if mesh.size() == 1:
            rows, columns = quantize_layouts(self.tensor, self.recipe)
            return (rows.data,), (rows.scale_inverse, *(columns if columns.data is not rows.data else ()))
        if self.recipe == "rowwise":
            data, scale_inverse = quantize(self.tensor.flatten(0, -2), "rowwise")
            return (data.view(self.shape), scale_inverse.view(*self.shape[:-1], 1)), ()
        if self.scale_inverse is None:  # before the first optimizer step
            self.scale_inverse = tensorwise_scale(self.tensor.abs().amax().float(), mesh).view(1, 1)
        # Not a copy: FSDP's copy-in stream would reuse its memory before the compute stream has read it.
        return (quantize_with(self.tensor, self.scale_inverse),), (self.scale_inverse,)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor, ...],
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> "tuple[GatheredTensor, tuple[torch.Tensor, ...]] | None":
        """The full weight, and the tensors whose memory FSDP2 frees after use."""
        if out is None:
            tensors = [*outputs, *metadata]
            if self.scale_inverse is not None:
                tensors[1] = tensors[1].clone()  # the shard's own must not be refilled below
            weight = GatheredTensor(tensors, self.recipe, param_dtype)
            return weight, tuple(tensor for tensor in weight.tensors() if tensor.dtype == torch.int8)
        # FSDP2 refilled the same memory. Tensors saved for the backward pass refer to it, so refill the rest as well.
        weight = out._local_tensor if isinstance(out, DTensor) else out  # type: ignore[assignment]
        for tensor, new in zip(weight.tensors()[len(outputs) :], metadata, strict=True):
            tensor.data.copy_(new)  # .data hides the write from autograd, as FSDP2 does
            keep_for_current_stream(new)  # under CPU offload, the copy-in stream has made it
        return None


def quantize_layouts(weight: torch.Tensor, recipe: ScaleRecipe) -> tuple[Quantized, Quantized]:
    """The weight as the output GEMM needs it, and as the right operand of the input-gradient GEMM."""
    if recipe == "tensorwise":
        return _quantize_once(weight)
    rows, columns = (round_matrix if weight.dim() == 2 else round_experts)(weight, torch.int8)
    return rows, as_right(columns)


@fused
def _quantize_once(weight: torch.Tensor) -> tuple[Quantized, Quantized]:
    rows = quantize(weight, "tensorwise")
    return rows, as_right(rows)


Origin = tuple[int, str]
TENSORS = ("row_data", "row_scale_inverse", "column_data", "column_scale_inverse")


class GatheredTensor(torch.Tensor):
    """A full tensor in 8 bits, (..., rows, columns), with its scale inverse, (..., rows, 1), (1, 1) or ().

    To autograd it has the high-precision `dtype`; only `LowPrecisionMatmul` multiplies by its 8-bit data.

    Args:
        tensors: `TENSORS`, two for the GEMM that sums over columns and two for the GEMM that sums over rows. The latter
            are missing if the tensor came in shards, which have no scales of columns.
        source: (dimension, group) to gather in high precision again from this rank's shard, which is then the third and
            last of the tensors; None if it is not kept.
    """

    row_data: torch.Tensor
    row_scale_inverse: torch.Tensor
    column_data: torch.Tensor
    column_scale_inverse: torch.Tensor
    shard: torch.Tensor

    @staticmethod
    def __new__(
        cls, tensors: Sequence[torch.Tensor], recipe: ScaleRecipe, dtype: torch.dtype, source: Origin | None = None
    ) -> "GatheredTensor":
        data = tensors[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(
        self, tensors: Sequence[torch.Tensor], recipe: ScaleRecipe, dtype: torch.dtype, source: Origin | None = None
    ) -> None:
        self.recipe: ScaleRecipe = recipe
        self.source = source
        self.attributes = [*TENSORS[:2], "shard"] if source else [*TENSORS[: len(tensors)]]
        for name, tensor in zip(self.attributes, tensors, strict=True):
            setattr(self, name, tensor)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredTensor({self.by_rows()}, {self.by_columns()})"

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.attributes]

    def by_rows(self) -> Quantized:
        return Quantized(self.row_data, self.row_scale_inverse)

    def by_columns(self) -> Quantized | None:
        """With one scale per column, or the only one; None if these scales are not known."""
        if "column_data" in self.attributes:
            return Quantized(self.column_data, self.column_scale_inverse)
        return self.by_rows() if self.recipe == "tensorwise" else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # FSDP2 calls as_strided with the weight's own shape and strides, DTensor.to_local() view with its own shape.
        # Tensor parallelism gathers the tokens of several sequences as if they were one.
        same = func is aten.view.default and len(args[1]) > 1 and args[1][-1] == args[0].shape[-1]
        whole = func is aten.as_strided.default and [list(sizes) for sizes in args[1:3]] == [
            list(args[0].shape),
            list(args[0].stride()),
        ]
        if same or whole or func in (aten.detach.default, aten.alias.default):
            tensors, leading = args[0].tensors(), args[0].row_data.shape[:-1]
            if same:
                rows = args[1][:-1]
                tensors = [t.view(*rows, t.shape[-1]) if t.shape[:-1] == leading else t for t in tensors]
            return cls(tensors, args[0].recipe, args[0].dtype, args[0].source)
        if any(isinstance(leaf, cls) for leaf in pytree.tree_leaves(written(func, args, kwargs or {}))):
            raise TypeError(f"{func} would change a tensor that is gathered in 8 bits; change the shards instead.")
        # Any other operation gets the tensor in high precision.
        args, kwargs = pytree.tree_map_only(cls, lambda gathered: gathered.dequantize_all(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def dequantize_all(self) -> torch.Tensor:
        return dequantize(self.row_data, self.row_scale_inverse, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[ScaleRecipe, torch.dtype, Origin | None]]:
        return self.attributes, (self.recipe, self.dtype, self.source)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        metadata: tuple[ScaleRecipe, torch.dtype, Origin | None],
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> "GatheredTensor":
        return GatheredTensor(list(inner.values()), *metadata)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation changes: its own, those of `out`, and the lists of a foreach operation."""
    if not func._schema.is_mutable:
        return []
    named = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    changes = [
        argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    return [named[name] for name in changes if name in named]


def gathered_operand(x: torch.Tensor, columns: bool = False) -> Quantized | None:
    """The operand that a tensor is if FSDP or tensor parallelism gathered it in low precision. With `columns`, it has
    one scale per column; None if these are not known."""
    if isinstance(x, GatheredTensor):
        return x.by_columns() if columns else x.by_rows()
    if hasattr(x, "_scale"):  # torchao's Float8TrainingTensor, which has one scale
        return Quantized(x._data, x._scale.reciprocal())  # type: ignore[attr-defined]
    return None


def high_precision(x: torch.Tensor) -> tuple[torch.Tensor, Origin | None]:
    """x, (..., columns), in high precision: (rows, columns), or this rank's shard and from where the others come."""
    if isinstance(x, GatheredTensor) and x.source is not None:
        return x.shard, x.source
    return x.flatten(0, -2), None


def grad_weight_of_shards(
    grad: torch.Tensor, grad_source: Origin | None, x: torch.Tensor, x_source: Origin | None, ends: torch.Tensor | None
) -> torch.Tensor:
    """The weight gradient in high precision, (N, K) or (E, N, K), of what `high_precision` returned of grad_output and
    x. A GEMM hides its gather, unless several sequences are sharded each by itself."""
    if x_source is None and grad_source is not None and grad_source[0] == 0:
        return all_gather_matmul(grad, [x], grad_source[1])[0]
    if grad_source is None and x_source is not None and x_source[0] == 0:
        return all_gather_matmul(x, [grad], x_source[1])[0].t()
    return grouped_mm_over_rows(_gather_again(grad, grad_source), _gather_again(x, x_source), ends)


def _gather_again(x: torch.Tensor, source: Origin | None) -> torch.Tensor:
    return x if source is None else all_gather_no_grad(x, *source).flatten(0, -2)


def tensorwise_scale(amax: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Tensorwise scale inverses from the amaxes of the shards."""
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return (amax / LARGEST).clamp_min(SMALLEST_SCALE)


@torch.no_grad()
def set_tensorwise_scales(models: Sequence[nn.Module]) -> None:
    """Computes the scales of all weights that are gathered from shards tensorwise, in one reduction."""
    sharded = [
        (parameter.device_mesh, parameter._local_tensor)
        for model in models
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, ShardedWeight)
    ]
    # Not over tensor-parallel ranks: each has its own matrix with its own scale.
    mesh = sharded[0][0]["fsdp"] if sharded else None
    if mesh is None or mesh.size() == 1:
        return
    amax = torch.stack([weight.tensor.abs().amax().float() for _, weight in sharded])
    for (_, weight), scale in zip(sharded, tensorwise_scale(amax, mesh), strict=True):
        weight.scale_inverse = scale.view(1, 1)
