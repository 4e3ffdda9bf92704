"""Asynchronous tensor parallelism: the compiler cuts a collective and the GEMM beside it into pieces, and one piece
travels while another is computed (arXiv 2105.05720). Pieces travel through symmetric memory, which needs CUDA."""

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
    """Counts the GEMMs that the compiler has fused with a collective.

    It stands behind the compiler's own passes and sees each graph as it will run. The compiler silently leaves a
    collective as it is where it knows no pattern for it.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.count += sum(any(name in str(node.target) for name in FUSED) for node in graph.nodes)

    def uuid(self) -> None:
        """No key: a graph from the compiler's cache would not be counted."""

    def check(self) -> None:
        """After the first step.

        Raises:
            ConfigError: nothing was fused, so communication is as synchronous as without the key.
        """
        if self.count == 0:
            raise ConfigError(
                "parallelism.enable_async_tensor_parallel: the compiler fused no collective into a GEMM, so nothing "
                "would overlap; unset it, or set TORCH_LOGS=+inductor to see why."
            )
        logger.info(f"asynchronous tensor parallelism: {self.count} GEMMs fused with a collective")


def enable_async_tensor_parallel(mesh: DeviceMesh) -> FusedGemms:
    """Sets up symmetric memory for the tensor-parallel ranks and turns the compiler's pass on. Before compilation.

    Args:
        mesh: the tensor-parallel ranks, one dimension, on CUDA.
    """
    enable_symmetric_memory(mesh.get_group().group_name)
    fused = FusedGemms()
    fuse_collectives_with_gemms(fused)
    return fused
