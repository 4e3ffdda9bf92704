"""Data parallelism: FSDP2, HSDP, DDP and one process, all through `fully_shard`.

One process is a single shard, DDP replicates a single shard. So every layout runs the same code in the same precision:
float32 weights and gradients around a computation in `param_dtype`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan.compat.distributed import (
    DefaultReduceScatter,
    FSDPParam,
    all_gather_of_one_rank_copies_twice,
    fsdp_parameters,
    reduce_scatter_of_one_rank_copies,
)
from torchtitan.device import keep_for_current_stream
from torchtitan.errors import ConfigError
from torchtitan.registry import deferred

_prefetch_experts = deferred("torchtitan.parallel.expert:prefetch_experts")


def require_parts(model: nn.Module) -> None:
    """Raises a ConfigError if a model, such as a user's own, lacks the parts that define the FSDP groups."""
    if not isinstance(getattr(model, "layers", None), nn.ModuleDict) or not hasattr(model, "tok_embeddings"):
        raise ConfigError(
            f"model.name: {type(model).__name__} cannot be sharded block by block: it needs an embedding named "
            "tok_embeddings, and its blocks in an nn.ModuleDict named layers, by number. Or register it with its own "
            "`parallelize` (docs/extension.md)."
        )


class Group(nn.Module):
    """A function around which FSDP gathers and reduces the weights of some modules together. FSDP acts in hooks of a
    module's forward, and the modules' own do not suit it: the chunked loss runs the output layer once a chunk, each
    time with its backward pass."""

    def __init__(self, run: Callable[..., torch.Tensor], modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.run = run
        self.members = nn.ModuleList(modules)

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.run(*inputs)

    def release(self) -> list[nn.Parameter]:
        """The parameters, which belong to the model under their own names; `fully_shard` has seen them here."""
        parameters = list(self.parameters())
        del self.members
        return parameters


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    keep_last: int = 0,
) -> None:
    """Shards each block, then the remaining parameters (the root).

    The root's weights stay gathered from the start of the forward pass to the end of the backward pass, and a `Group`'s
    from its own start: the chunked loss computes its gradient during the forward pass.

    Args:
        blocks: modules to gather and reshard one by one.
        mesh: (fsdp,), or (dp_replicate, fsdp).
        param_dtype: of gathered weights, and so of the computation.
        reduce_dtype: in which ranks sum gradients. One rank has nothing to sum, and rounds nothing: it copies them
            into the weights' dtype.
        experts: modules inside of blocks that are sharded over `expert_mesh` instead.
        keep_last: number of last blocks that are not resharded after the forward pass, since the backward pass needs
            them at once.
    """

    def options(mesh: DeviceMesh) -> dict[str, Any]:
        reduced = reduce_dtype if mesh.size() > 1 else torch.float32
        return {
            "mesh": mesh,
            # Weights set the dtype of activations; casting inputs would also round the RoPE table.
            "mp_policy": MixedPrecisionPolicy(param_dtype, reduced, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        }

    last = [module for block in blocks[len(blocks) - keep_last :] for module in with_experts(block, experts)]
    kept = [module for module in (*experts, *blocks) if not reshard_after_forward or module in last]
    for module in experts:
        assert expert_mesh is not None
        fully_shard(module, reshard_after_forward=module not in kept, **options(expert_mesh))
    for block in blocks:
        fully_shard(block, reshard_after_forward=block not in kept, **options(mesh))
    done = {parameter for block in blocks if isinstance(block, Group) for parameter in block.release()}
    fully_shard(model, reshard_after_forward=False, ignored_params=done, **options(mesh))
    if experts:
        _prefetch_experts(blocks, experts)
    model.stay_gathered = [model, *kept]  # type: ignore[assignment]
    single = [*blocks, model] if mesh.size(-1) == 1 else []
    if expert_mesh is not None and expert_mesh.size(-1) == 1:
        single += experts
    for module in single:
        assert isinstance(module, FSDPModule)
        if reduce_scatter_of_one_rank_copies():
            module.set_custom_reduce_scatter(_NoReduceScatter())
        if all_gather_of_one_rank_copies_twice():
            for parameter in fsdp_parameters(module):
                parameter.__class__ = _CastIntoPlace  # a property, which FSDP asks, cannot be set on one object


def with_experts(block: nn.Module, experts: Sequence[nn.Module]) -> list[nn.Module]:
    """The block, and those among the experts that are in it."""
    return [block, *(module for module in block.modules() if module in experts)]


class _NoReduceScatter(DefaultReduceScatter):
    """Makes the input and the output of a reduce-scatter the same tensor. With a single shard, FSDP would copy the
    gradients from one to the other."""

    _input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates the input; the next call, for the output, returns it again."""
        if self._input is None:
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input
        output, self._input = self._input, None
        keep_for_current_stream(output)  # the compute stream, to which the memory belongs, waits only for the reduction
        return output


class _CastIntoPlace(FSDPParam):
    """A weight of a single shard, which FSDP would cast into a new tensor, and copy from there into the gathered
    weight's memory. Here the copy casts."""

    def _is_cast(self) -> bool:
        """Not a weight that says itself what is gathered, nor one that has to come from the host first."""
        return not hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather") and not self.offload_to_cpu

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        return [self._sharded_param_data] if self._is_cast() else super().all_gather_inputs

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        *arguments: Any,
        **options: Any,
    ) -> None:
        if self._is_cast() and self.param_dtype is not None:
            all_gather_input_dtypes = [self.param_dtype]
        super().init_all_gather_outputs(all_gather_input_numels, all_gather_input_dtypes, *arguments, **options)


def set_last_microbatch(models: Iterable[nn.Module], last: bool) -> None:
    """Makes replicas all-reduce gradients after the last micro-batch only. (Shards reduce-scatter after each one, so no
    rank holds more than a gradient shard.)

    Weights that stay gathered from a forward to its backward pass stay so until the last micro-batch: in between fewer
    activations exist, so the peak of memory is no higher.
    """
    for model in models:
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
            for module in getattr(model, "stay_gathered", ()):
                module.set_reshard_after_backward(last, recurse=False)


def reshard(models: Iterable[nn.Module]) -> None:
    """Frees gathered weights after a forward pass without a backward pass."""
    for model in models:
        for module in getattr(model, "stay_gathered", ()):
            module.reshard()
