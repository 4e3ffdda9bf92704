"""Sees the operations of a step on a simulated GPU: compiled graphs as they run, and operations outside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import compiler
import torch

from torchtitan.compat.dispatch import FakeTensor, TorchDispatchMode, pytree

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
# Not bytes of operations: their time is that of links.
COLLECTIVES = ("_c10d_functional", "c10d", "torchtitan.exchange_", "symm_mem")


@dataclass
class Work:
    """What one rank computes in a step.

    Attributes:
        gemms: FLOPs by the kind of numbers.
        attention: FLOPs of forward and backward passes; causal attention counts half.
        fused_bytes: read and written by generated kernels.
        other_bytes: read and written by uncompiled operations other than GEMMs and updates.
        update_bytes: read and written by the optimizer and by clipping.
        kernels: launches of generated kernels.
    """

    gemms: dict[str, float] = field(default_factory=dict)
    attention: tuple[float, float] = (0.0, 0.0)
    fused_bytes: float = 0.0
    other_bytes: float = 0.0
    update_bytes: float = 0.0
    kernels: float = 0.0

    def __sub__(self, other: "Work") -> "Work":
        return self.plus(other, -1.0)

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """This work and `times` another."""
        kinds = self.gemms.keys() | other.gemms.keys()
        return Work(
            {kind: self.gemms.get(kind, 0.0) + times * other.gemms.get(kind, 0.0) for kind in sorted(kinds)},
            (
                self.attention[0] + times * other.attention[0],
                self.attention[1] + times * other.attention[1],
            ),
            self.fused_bytes + times * other.fused_bytes,
            self.other_bytes + times * other.other_bytes,
            self.update_bytes + times * other.update_bytes,
            self.kernels + times * other.kernels,
        )


Count = Callable[[Work, str, list[tuple[int, ...]], list[str]], bool]


class Watch(TorchDispatchMode):
    """Within this context, adds up the work: GEMMs and attention with `count`, and operators whose names begin with one
    of `updates`, which update or clip."""

    supports_higher_order_operators = True

    def __init__(self, count: Count, updates: Sequence[str]) -> None:
        super().__init__()
        self.count = count
        self.updates = tuple(updates)
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
        if any(kind not in PLAIN for kind in types):
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
        shapes = [tuple(map(int, tensor.shape)) for tensor in read]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in read]
        name = func._opname
        if not self.count(self.work, f"{func.namespace}.{name}", shapes, dtypes):
            size = sum(tensor.nbytes for tensor in tensors)
            if name == "all_gather_copy_in":  # copies the shards into their place in the output, which it returns
                size = 2 * sum(tensor.nbytes for tensor in tensors_in(args[0]))
            if name.startswith(self.updates) and name != "_foreach_copy_":  # FSDP copies with it what it gathers
                self.work.update_bytes += size
            elif not name.startswith("empty") and name != "detach":
                self.work.other_bytes += size
        return out


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def work_of_graph(graph: Any, code: str, count: Count) -> Work:
    """Counts kernels, bytes and GEMMs of one compiled graph, for the sizes that it was lowered for."""
    work = Work(kernels=compiler.launches(code))
    for node in graph.scheduler.nodes:
        size = compiler.bytes_of(node)
        operator = compiler.operator_of(node)
        operands = [] if operator is None else [i for i in node.node.inputs if hasattr(i, "get_size")]
        hint = graph.sizevars.optimization_hint  # of a size that varies: the first one
        shapes = [
            tuple(map(hint, operand.get_size())) for operand in operands if operand.maybe_get_layout() is not None
        ]
        dtypes = [
            str(operand.get_dtype()).removeprefix("torch.")
            for operand in operands
            if operand.maybe_get_layout() is not None
        ]
        if operator is not None and (count(work, operator, shapes, dtypes) or operator.startswith(COLLECTIVES)):
            continue
        if operator is None or operator.startswith("torchtitan."):  # a kernel of our own
            work.fused_bytes += size
        else:
            work.other_bytes += size
    return work
