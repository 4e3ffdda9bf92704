"""Sees the operations of a step on a simulated GPU: compiled graphs as they run, and operations outside them."""

from collections.abc import Sequence
from typing import Any

import compiler
import torch

from torchtitan.compat.dispatch import FakeTensor, TorchDispatchMode
from torchtitan.tools.plan.recorder import PLAIN, shapes_and_dtypes, tensors_in
from torchtitan.tools.plan.step_model import Work

# Not bytes of operations: their time depends on links.
COLLECTIVES = ("_c10d_functional", "c10d", "torchtitan.exchange_", "symm_mem")
UPDATES = ("_fused_adam", "_foreach_")  # beginnings of operators that update or clip


class Watch(TorchDispatchMode):
    """Within this context, adds up the work of a step."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that torch.compile works within

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1
        if any(cls not in PLAIN for cls in types):
            return NotImplemented  # a subclass such as DTensor first decomposes into plain operations
        out = func(*args, **kwargs)
        if compiler.in_compiled_code() or getattr(func, "is_view", True):  # or of higher order
            return out
        if func is torch.ops.aten.copy_.default and args[0] is args[1]:  # does nothing
            return out
        read = tensors_in((args, kwargs))
        changed = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
        ]
        wrote = [tensor for tensor in tensors_in(out) if not any(tensor is other for other in changed)] + changed
        tensors = [*read, *wrote]
        if not any(tensor.device.type == "cuda" for tensor in tensors) or func.namespace not in ("aten", "fsdp"):
            return out
        name = func._opname
        if not self.work.count(name, *shapes_and_dtypes(read)):
            size = sum(tensor.nbytes for tensor in tensors)
            if name == "all_gather_copy_in":  # copies the shards into their place in the output, which it returns
                size = 2 * sum(tensor.nbytes for tensor in tensors_in(args[0]))
            if name.startswith(UPDATES) and name != "_foreach_copy_":  # FSDP copies with it what it gathers
                self.work.update_bytes += size
            elif not name.startswith("empty") and name != "detach":
                self.work.other_bytes += size
        return out


def work_of_graph(graph: Any) -> Work:
    """Counts bytes and GEMMs of one compiled graph, for the sizes that it was lowered for."""
    work = Work()
    for node in graph.scheduler.nodes:
        size = compiler.bytes_of(node)
        operator = compiler.operator_of(node)
        if operator is not None:
            inputs = [i for i in node.node.inputs if hasattr(i, "get_size") and i.maybe_get_layout() is not None]
            hint = graph.sizevars.optimization_hint  # of a size that varies: the first one
            shapes = [tuple(map(hint, tensor.get_size())) for tensor in inputs]
            dtypes = [str(tensor.get_dtype()).removeprefix("torch.") for tensor in inputs]
            if work.count(operator, shapes, dtypes) or operator.startswith(COLLECTIVES):
                continue
        if operator is None or operator.startswith("torchtitan."):  # a kernel of our own
            work.fused_bytes += size
        else:
            work.other_bytes += size
    return work


def plus(work: Work, other: Work, times: float = 1.0) -> Work:
    """`work` and `times` another."""
    dtypes = work.gemms.keys() | other.gemms.keys()
    ahead, back = (mine + times * more for mine, more in zip(work.attention, other.attention, strict=True))
    return Work(
        {dtype: work.gemms.get(dtype, 0.0) + times * other.gemms.get(dtype, 0.0) for dtype in sorted(dtypes)},
        (ahead, back),
        work.fused_bytes + times * other.fused_bytes,
        work.other_bytes + times * other.other_bytes,
        work.update_bytes + times * other.update_bytes,
    )
