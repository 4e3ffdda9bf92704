"""Asynchronous tensor parallelism: the compiler splits a collective and its adjacent GEMM into chunks and overlaps them
(arXiv 2105.05720). Chunks are exchanged through symmetric memory, which requires CUDA."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.compat.distributed import enable_symmetric_memory
from torchtitan.compat.inductor import CustomGraphPass, fuse_collectives_with_gemms
from torchtitan.errors import ConfigError
from torchtitan.logging import logger

FUSED = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


class FusedGemms(CustomGraphPass):
    """Counts the GEMMs that the compiler fused with a collective.

    Runs after the compiler's own passes, so it sees each graph in its final form. The compiler silently leaves a
    collective alone if no pattern matches it.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.count += sum(any(name in str(node.target) for name in FUSED) for node in graph.nodes)

    def uuid(self) -> None:
        """Disables caching of compiled graphs, since a cached graph would not be counted."""

    def check(self) -> None:
        """Call it after the first step.

        Raises:
            ConfigError: nothing was fused, so communication is still synchronous.
        """
        if self.count == 0:
            raise ConfigError(
                "parallelism.enable_async_tensor_parallel: the compiler fused no collective with a GEMM, so nothing "
                "overlaps; unset it, or set TORCH_LOGS=+inductor to see why."
            )
        logger.info(f"asynchronous tensor parallelism: {self.count} GEMMs fused with a collective")


def enable_async_tensor_parallel(mesh: DeviceMesh) -> FusedGemms:
    """Sets up symmetric memory for the tensor-parallel ranks and enables the compiler pass. Call it before compiling.

    Args:
        mesh: the tensor-parallel ranks, one dimension, on CUDA.
    """
    enable_symmetric_memory(mesh.get_group().group_name)
    fused = FusedGemms()
    fuse_collectives_with_gemms(fused)
    return fused
