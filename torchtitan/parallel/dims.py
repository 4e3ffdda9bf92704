"""Degrees of parallelism: how they fit the number of processes, and the mesh that they make."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchtitan.config.system import Parallelism

if TYPE_CHECKING:  # degrees are checked before torch is needed
    from torch.distributed.device_mesh import DeviceMesh

Division = Literal["colwise", "rowwise"]
"""How tensor parallelism divides a linear layer: its outputs (N) or its inputs (K)."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees that multiply to the number of processes. Every rank holds its own rows of a batch."""

    dp_replicate: int
    dp_shard: int

    @property
    def dp(self) -> int:
        """Data-parallel ranks: how many slices a global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        match (self.dp_replicate, self.dp_shard):
            case (1, 1):
                return "one process"
            case (replicate, 1):
                return f"DDP {replicate}"
            case (1, shard):
                return f"FSDP {shard}"
        return f"HSDP {self.dp_replicate} x {self.dp_shard} (replicate x shard)"

    def build_mesh(self, device_type: str) -> "DeviceMesh":
        """The mesh (dp_replicate, dp_shard). The process group must be there."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )


def find_dims(parallelism: Parallelism, world_size: int, problems: list[str]) -> ParallelDims | None:
    """The degrees for `world_size` processes; what is wrong with them goes to `problems`, a sentence each."""
    for key in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, key) > 1:
            problems.append(f"parallelism.{key}: this kind of parallelism is not built yet; set it to 1.")
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    others = replicate * (
        parallelism.tensor_parallel_degree * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree
    )
    if shard == -1 and world_size % others == 0:
        shard = world_size // others
    if shard == -1:
        problems.append(
            f"parallelism: {world_size} processes cannot be divided by the product of the degrees, {others}; "
            f"start a multiple of {others} processes or lower the degrees."
        )
        return None
    if shard < 1:
        problems.append(f"parallelism.data_parallel_shard_degree must be -1 or above 0, not {shard}.")
        return None
    if shard * others != world_size:
        problems.append(
            f"parallelism: the degrees multiply to {shard * others}, but there are {world_size} processes; "
            f"set data_parallel_shard_degree to -1 to take what is left, or start {shard * others} processes."
        )
        return None
    return ParallelDims(replicate, shard)
