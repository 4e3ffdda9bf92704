"""Degrees of parallelism: how they fit the number of processes, and the device meshes they define."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config.system import Parallelism
from torchtitan.errors import counted
from torchtitan.protocols import ModelArgs

Style = Literal[
    "embedding", "sequence", "sequence_gather", "heads", "gather", "colwise", "gather_colwise", "colwise_norm",
    "rowwise",
]  # fmt: skip
"""How tensor parallelism shards a module; see `tensor.apply_tensor_parallel`."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees whose product is the number of processes, from the outermost, whose ranks are furthest apart, to the
    innermost, whose ranks are neighbours; `ep` is not a factor of it."""

    pp: int = 1  # ranks that the pipeline stages are spread over
    dp_replicate: int = 1  # replicas of the (sharded) model, each with its own rows of the batch
    dp_shard: int = 1  # ranks that one replica is sharded over, each with its own rows
    cp: int = 1  # ranks that share each sequence; weights are sharded over them too
    tp: int = 1  # ranks that share each GEMM
    ep: int = 1  # ranks that share the experts of a layer, neighbours among the ranks of dp_shard x cp x tp

    @property
    def dp(self) -> int:
        """Ranks with their own rows: how many slices a global batch is split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def fsdp(self) -> int:
        """Ranks that weights are sharded over."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        names = []
        if self.dp_replicate > 1 and self.dp_shard > 1:
            names.append(f"HSDP {self.dp_replicate} x {self.dp_shard} (replicate x shard)")
        elif self.dp > 1:
            names.append(f"DDP {self.dp}" if self.dp_replicate > 1 else f"FSDP {self.dp}")
        others = (("CP", self.cp), ("TP", self.tp), ("PP", self.pp), ("EP", self.ep))
        names += [f"{name} {degree}" for name, degree in others if degree > 1]
        return " x ".join(names) or "one process"

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh (pp, dp_replicate, fsdp, tp). The process group must be initialized."""
        return _mesh(device_type, pp=self.pp, dp_replicate=self.dp_replicate, fsdp=self.fsdp, tp=self.tp)


@dataclass(frozen=True)
class Meshes:
    """This rank's position among the others."""

    dims: ParallelDims
    mesh: DeviceMesh  # (pp, dp_replicate, fsdp, tp)
    context_mesh: DeviceMesh | None  # the ranks that share a sequence with this one; None without context parallelism
    # (pp, dp_replicate, fsdp, ep) of the experts' weights, over the ranks of `mesh` in the same order; None if `mesh`
    # serves them as well, or without experts.
    expert_mesh: DeviceMesh | None

    @property
    def dp_rank(self) -> int:
        """Which of the `dims.dp` slices of the global batch this rank trains on."""
        return self.mesh.get_local_rank("dp_replicate") * self.dims.dp_shard + (
            self.mesh.get_local_rank("fsdp") // self.dims.cp
        )

    @property
    def is_first_of_dp_rank(self) -> bool:
        """Whether this is the first of the ranks that train on the same slice of the batch."""
        pp, _, fsdp, tp = self.mesh.get_coordinate() or ()
        return pp == 0 and tp == 0 and fsdp % self.dims.cp == 0


def build_meshes(dims: ParallelDims, device_type: str, args: ModelArgs) -> Meshes:
    """For a model with these sizes. Needs a process group. Collective."""
    pp, replicate, fsdp, tp, ep = dims.pp, dims.dp_replicate, dims.fsdp, dims.tp, dims.ep
    expert_mesh = context_mesh = None
    if args.moe is not None and (ep > 1 or tp > 1):
        expert_mesh = _mesh(device_type, pp=pp, dp_replicate=replicate, fsdp=fsdp * tp // ep, ep=ep)
    mesh = dims.build_mesh(device_type)
    if dims.cp > 1:
        context_mesh = _mesh(device_type, others=pp * dims.dp, cp=dims.cp, tp=tp)["cp"]
    return Meshes(dims, mesh, context_mesh, expert_mesh)


def _mesh(device_type: str, **sizes: int) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def find_dims(parallelism: Parallelism, world_size: int, problems: list[str]) -> ParallelDims | None:
    """The degrees for `world_size` processes. On a mismatch, appends a sentence to `problems` and returns None."""
    names = [f"data_parallel_{name}_degree" for name in ("replicate", "shard")]
    names += [f"{name}_parallel_degree" for name in ("tensor", "context", "pipeline")]
    degrees: dict[str, int] = {name: getattr(parallelism, name) for name in names}
    replicate, shard, tp, cp, pp = degrees.values()
    others = pp * replicate * cp * tp
    if shard == -1 and world_size % others == 0:
        shard = world_size // others
    if shard * others == world_size:
        ep, ranks = parallelism.expert_parallel_degree, shard * cp * tp
        if ranks % ep:
            fitting = ", ".join(str(value) for value in range(1, ranks + 1) if ranks % value == 0)
            problems.append(
                f"parallelism.expert_parallel_degree = {ep} does not divide the {ranks} ranks of dp_shard x context x "
                f"tensor parallelism = {shard} x {cp} x {tp}; these degrees do: {fitting}."
            )
            return None
        return ParallelDims(pp, replicate, shard, cp, tp, ep)
    named = ", ".join(f"{key} = {degree}" for key, degree in degrees.items() if degree > 1)
    verb, processes = "is" if world_size == 1 else "are", counted(world_size, "process")
    if shard == -1:
        problem = (
            f"{processes} {verb} not a multiple of the product of the degrees, {others} ({named}); start a multiple of "
            f"{others} processes (NGPU = {others})"
        )
    else:
        problem = (
            f"the degrees multiply to {shard * others} ({named}), but there {verb} {processes}; set "
            f"data_parallel_shard_degree to -1 to use the rest, start {shard * others} processes"
        )
    problems.append(f"parallelism: {problem}{_valid_degrees(degrees, world_size)}.")
    return None


def _valid_degrees(degrees: dict[str, int], world_size: int) -> str:
    """For each degree, the values that would fit with the others unchanged."""
    fitting = []
    free = degrees["data_parallel_shard_degree"] == -1  # it takes what the others leave
    for key, degree in degrees.items():
        left = world_size / math.prod(value for other, value in degrees.items() if other != key and value != -1)
        values = [value for value in range(1, world_size + 1) if (left % value == 0 if free else left == value)]
        if degree > 1 and values:
            fitting.append(f"{key} to {' or '.join(map(str, values))}")
    return f", or set {'; or '.join(fitting)}" if fitting else ", or lower the degrees"


def style_of(name: str, sharding: Mapping[str, Style]) -> Style | None:
    """The style of the module at this path."""
    return next((style for end, style in sharding.items() if f".{name}".endswith(f".{end}")), None)
