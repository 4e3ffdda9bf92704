"""The table of kernels: which implementation computes an operation, by the operands' device and dtype.

A plan replaces some rows, and the device that modules see.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchtitan.protocols import AttentionSpec


@dataclass(frozen=True)
class Kernel:
    """An implementation of an operation: a row of the table.

    Attributes:
        run: It computes the operation; attention is called with (spec, q, k, v, document_ids).
        applies: Whether it can do so with these operands; for attention, with these queries.
        does: the needs of an `AttentionSpec` that it meets; layers with other needs never get it.
        label: the name in the log, from queries and the number of key-value heads; None: `name`.
    """

    name: str
    run: Callable[..., Any]
    applies: Callable[..., bool] = lambda *operands: True
    does: Collection[str] = ()
    label: Callable[[torch.Tensor, int], str] | None = None


KERNELS: dict[str, list[Kernel]] = {}
"""The rows of each operation; the first that applies is used, and the last applies always."""


class _Simulated(NamedTuple):
    device_type: str
    tensor_class: type[torch.Tensor]


_simulated: _Simulated | None = None


@contextlib.contextmanager
def simulated_device(device: str, tensor_class: type[torch.Tensor], rows: Mapping[str, list[Kernel]]) -> Iterator[None]:
    """Within this context tensors on CPU stand for those of a device of this type, and `rows` replace the table's.

    Args:
        tensor_class: of tensors without memory, which no kernel of ours reads or writes.
    """
    global _simulated
    former, _simulated = {operation: KERNELS[operation] for operation in rows}, _Simulated(device, tensor_class)
    KERNELS.update(rows)
    try:
        yield
    finally:
        _simulated = None
        KERNELS.update(former)


def is_simulating() -> bool:
    """Whether a plan simulates a device."""
    return _simulated is not None


def has_no_memory(x: object) -> bool:
    """Whether x is a tensor of a simulated device, of which only the shape is known."""
    return _simulated is not None and isinstance(x, _simulated.tensor_class)


def device_type(x: torch.Tensor) -> str:
    """The type of the device that computes with x: in a plan, of the device that it simulates."""
    return x.device.type if _simulated is None else _simulated.device_type


def on_cpu(x: torch.Tensor, *_: object) -> bool:
    """Whether the kernels for CPUs compute with x."""
    return device_type(x) == "cpu"


def find_kernel(operation: str, *operands: torch.Tensor | torch.dtype) -> Callable[..., Any]:
    """What computes the operation with these operands."""
    for kernel in KERNELS[operation][:-1]:
        if kernel.applies(*operands):
            return kernel.run
    return KERNELS[operation][-1].run


def find_attention(operation: str, spec: AttentionSpec, q: torch.Tensor, documents: bool) -> Kernel:
    """The kernel for a layer that declares `spec`; a UserError if none does all of it. `documents`: there are ids."""
    needs, kernels = spec.needs(documents), [kernel for kernel in KERNELS[operation] if kernel.applies(q)]
    for kernel in kernels:
        if all(need in kernel.does for need in needs) and spec.documents >= documents:
            return kernel
    names = ", ".join(kernel.name for kernel in kernels)
    raise spec.refusal(needs, f"the kernels for {operation} in {q.dtype} on {q.device.type} ({names})")
