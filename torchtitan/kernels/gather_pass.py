"""A compiler pass for experts in 8 bits on a GPU."""

from typing import Any

import torch
from torch import fx

from torchtitan.compat import inductor
from torchtitan.kernels import grouped_8bit  # registers the operator

aten = torch.ops.aten


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
                node.meta.pop("eager_input_vals", None)  # of the arguments before
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
