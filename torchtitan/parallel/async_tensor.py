"""Asynchronous tensor parallelism: the compiler splits a collective and its adjacent GEMM into chunks and overlaps them
(arXiv 2105.05720). Chunks are exchanged through symmetric memory, which requires CUDA."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.compat.distributed import enable_symmetric_memory
from torchtitan.compat.inductor import (
    CustomGraphPass,
    fuse_collectives_with_gemms,
    get_hash_for_files,
    stable_topological_sort,
)
from torchtitan.logging import logger

# Parts of names of operators; of scaled GEMMs, too.
FUSED = ("fused_all_gather", "matmul_reduce_scatter", "torchtitan.all_gather_matmul")
SEPARATE = ("all_gather_into_tensor", "reduce_scatter_tensor")


class ExposeGemms(CustomGraphPass):
    """Removes what stands between a collective and its GEMMs, and hides them from the compiler's patterns."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        aten = torch.ops.aten
        for node in graph.find_nodes(op="call_function", target=aten.reshape.default):
            # A single sequence has two reshapes that cancel.
            origin = node.args[0].args[0] if node.args[0].target is aten.reshape.default else node
            if _is_wait(origin) and origin.meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(origin)
                graph.erase_node(node)
        for gemm in graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
            left = gemm.args[0]
            if left.target is torch.ops.prims.inductor_force_stride_order.default and _is_wait(left.args[0]):
                gemm.replace_input_with(left, left.args[0])  # the operand is row-major already

        _gather_once(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _gather_once(graph: torch.fx.Graph) -> None:
    """Makes one call of `all_gather_matmul` with the same shard: w1 and w3, and wq, wk and wv, share their input."""
    calls: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.torchtitan.all_gather_matmul.default):
        calls.setdefault((node.args[0], node.args[2]), []).append(node)
    for (shard, group), nodes in calls.items():
        if len(nodes) == 1:
            continue
        with graph.inserting_before(nodes[-1]):
            others = [other for node in nodes for other in node.args[1]]  # type: ignore[union-attr]
            merged = graph.call_function(torch.ops.torchtitan.all_gather_matmul.default, (shard, others, group))
        merged.meta["val"] = [value for node in nodes for value in node.meta["val"]]
        first = 0
        for node in nodes:
            for result in list(node.users):
                result.args = merged, first + result.args[1]  # type: ignore[operator]
            first += len(node.meta["val"])
            graph.erase_node(node)
        stable_topological_sort(graph)


def _is_wait(node: torch.fx.Node) -> bool:
    """Whether it is the result of a collective."""
    return "wait_tensor" in str(node.target)


def _moves_scales(node: torch.fx.Node) -> bool:
    """Whether a collective moves scales of rows, four bytes for each."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return bool(shape[-1] == 1)


class FusedGemms(CustomGraphPass):
    """Counts the collectives of tokens that the compiler fused with a GEMM, and the others, which it silently leaves
    alone if no pattern matches. Runs after the compiler's own passes, so it sees each graph in its final form."""

    def __init__(self) -> None:
        self.count = self.separate = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            name = str(node.target) if node.op == "call_function" else ""
            self.count += any(fused in name for fused in FUSED)
            self.separate += any(separate in name for separate in SEPARATE) and not _moves_scales(node)

    def uuid(self) -> None:
        """Disables caching of compiled graphs, since a cached graph would not be counted."""

    def report(self) -> None:
        """Logs how many collectives were fused, as a warning if that is fewer than half. Call it after the first step,
        when the blocks are compiled."""
        fused = f"{self.count} of {self.count + self.separate} collectives are fused with a GEMM"
        if self.count > 0 and self.count >= self.separate:
            logger.info(f"asynchronous tensor parallelism: {fused}")
            return
        logger.warning(
            f"parallelism.enable_async_tensor_parallel: {fused}, so most do not overlap; the run goes on. Unset it if "
            "steps are not faster with it, or set TORCH_LOGS=+inductor to see why."
        )


def enable_async_tensor_parallel(mesh: DeviceMesh) -> FusedGemms:
    """Sets up symmetric memory for tensor-parallel ranks and enables the compiler pass. Call it before compiling."""
    enable_symmetric_memory(mesh.get_group().group_name)
    fused = FusedGemms()
    fuse_collectives_with_gemms(ExposeGemms(), fused)
    return fused
