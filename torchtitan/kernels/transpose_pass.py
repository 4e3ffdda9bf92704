"""A compiler pass for bfloat16 GEMMs on CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchtitan.compat.inductor import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten

LEAST = 2**20  # elements of a gradient; below, the pass slows down as often as it speeds up


class TransposeWeightGradients(CustomGraphPass):
    """Materializes the transposed operand of a weight gradient before the GEMM. oneDNN multiplies bfloat16 matrices
    more slowly if the left one is transposed, as in gᵀ x. The compiler transposes fast, fused into the computation of
    g. The smaller operand is transposed: gᵀ x, or (xᵀ g)ᵀ."""

    def __call__(self, graph: fx.Graph) -> None:
        transposed_of: dict[fx.Node, fx.Node] = {}  # one x can serve several weights
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            left, right = node.args
            if not _is_weight_gradient(left.meta["val"], right.meta["val"]):
                continue
            with graph.inserting_before(node):
                if left.meta["val"].shape[0] <= right.meta["val"].shape[1]:
                    node.replace_input_with(left, _row_major(graph, left))
                    continue
                if right not in transposed_of:
                    transposed_of[right] = _row_major(graph, _call(graph, aten.permute.default, right, [1, 0]))
                g = _call(graph, aten.permute.default, left, [1, 0])
                gemm = _call(graph, aten.mm.default, transposed_of[right], g)
                node.replace_all_uses_with(_call(graph, aten.permute.default, gemm, [1, 0]))
            graph.erase_node(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _is_weight_gradient(left: torch.Tensor, right: torch.Tensor) -> bool:
    kind = left.dtype == torch.bfloat16 and left.device.type == "cpu"
    if not kind or not all(isinstance(size, int) for size in (*left.shape, *right.shape)):  # dynamic shapes
        return False
    transposed = left.stride(0) == 1 and left.stride(1) == left.shape[0] > 1 and right.is_contiguous()
    return transposed and left.shape[0] * right.shape[1] >= LEAST


def _row_major(graph: fx.Graph, matrix: fx.Node) -> fx.Node:
    """The same matrix, row-major in memory. (A clone would not do: the compiler would keep the old strides.)"""
    strides = (matrix.meta["val"].shape[1], 1)
    return _call(graph, torch.ops.prims.inductor_force_stride_order.default, matrix, strides)


def _call(graph: fx.Graph, operation: Callable[..., torch.Tensor], *args: Any) -> fx.Node:
    node = graph.call_function(operation, args)
    node.meta["val"] = operation(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return node
