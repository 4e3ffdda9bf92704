"""The table of kernels: which implementation computes an operation, by the operands' device and dtype."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.protocols import AttentionSpec


@dataclass(frozen=True)
class Kernel:
    """An implementation of an operation: a row of the table.

    Attributes:
        run: It computes the operation; attention is called with (spec, q, k, v, document_ids), and
            the sinks, (heads,), if the layer has some.
        applies: Whether it can do so with these operands; for attention, with these queries.
        does: the needs of an `AttentionSpec` that it meets; layers with other needs never get it.
        label: the name in the log, from the spec, queries and the number of key-value heads; None: `name`.
    """

    name: str
    run: Callable[..., Any]
    applies: Callable[..., bool] = lambda *operands: True
    does: Collection[str] = ()
    label: Callable[[AttentionSpec, torch.Tensor, int], str] | None = None


KERNELS: dict[str, list[Kernel]] = {}
"""The rows of each operation; the first that applies is used, and the last applies always."""


SIMULATED: list[tuple[str, type[torch.Tensor]]] = []
"""In a plan, the type of the device that it simulates, and the class of its tensors, which have no memory."""


def has_no_memory(x: object) -> bool:
    """Whether x is a tensor of a simulated device, of which only the shape is known."""
    return bool(SIMULATED) and isinstance(x, SIMULATED[-1][1])


def device_type(x: torch.Tensor) -> str:
    """The type of the device that computes with x: in a plan, of the device that it simulates."""
    return SIMULATED[-1][0] if SIMULATED else x.device.type


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
