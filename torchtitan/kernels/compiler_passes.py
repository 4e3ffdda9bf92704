"""Passes of the compiler: for bfloat16 GEMMs on CPU, and for experts in 8 bits on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchtitan.compat import inductor
from torchtitan.kernels import grouped_8bit  # registers the operator

aten = torch.ops.aten

LEAST_ELEMENTS = 2**20  # elements of a gradient; below, the pass slows down as often as it speeds up


class TransposeWeightGradients(inductor.CustomGraphPass):
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
        return inductor.get_hash_for_files((__file__,))


def _is_weight_gradient(left: torch.Tensor, right: torch.Tensor) -> bool:
    of_cpu = left.dtype == torch.bfloat16 and left.device.type == "cpu"
    if not of_cpu or not all(isinstance(size, int) for size in (*left.shape, *right.shape)):  # dynamic shapes
        return False
    transposed = left.stride(0) == 1 and left.stride(1) == left.shape[0] > 1 and right.is_contiguous()
    return transposed and left.shape[0] * right.shape[1] >= LEAST_ELEMENTS


def _row_major(graph: fx.Graph, matrix: fx.Node) -> fx.Node:
    """The same matrix, row-major in memory. (A clone would not do: the compiler would keep the old strides.)"""
    strides = (matrix.meta["val"].shape[1], 1)
    return _call(graph, torch.ops.prims.inductor_force_stride_order.default, matrix, strides)


def _call(graph: fx.Graph, operation: Callable[..., torch.Tensor], *args: Any) -> fx.Node:
    node = graph.call_function(operation, args)
    node.meta["val"] = operation(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return node


class FuseGathers(inductor.CustomGraphPass):
    """Lets the rounding of experts' rows read them where they come from: the tokens before they are sorted by expert,
    or the gradient of the result, times the router's weights. Otherwise they are written and read once more."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.torchtitan.round_rows_and_columns.default):
            operand: Any
            operand, *more = node.args
            rows, factor = operand, None
            if operand.target is aten.mul.Tensor and _shape(operand.args[1]) == (_shape(operand)[0], 1):
                rows, factor = operand.args
            if len(more) == 2 and _is_gather(rows) and rows.meta["val"].dtype == operand.meta["val"].dtype:
                source, (places,) = rows.args
                node.args = (source, *more, places, factor)
                node.meta.pop("eager_input_vals", None)  # values of the former arguments
                for unused in dict.fromkeys((operand, rows)):
                    if not unused.users:
                        graph.erase_node(unused)

    def uuid(self) -> bytes:
        return inductor.get_hash_for_files((__file__, grouped_8bit.__file__, inductor.__file__))


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node, fx.Node) else ()


def _is_gather(node: Any) -> bool:
    """Whether it has rows of a matrix, as `index_select` gives them."""
    if node.target is not aten.index.Tensor:
        return False
    source, places = node.args
    return len(places) == 1 and len(_shape(source)) == 2 and len(_shape(places[0])) == 1
