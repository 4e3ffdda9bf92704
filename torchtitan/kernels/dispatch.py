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
        name: what messages call it.
        applies: Whether it can compute the operation with these operands; for attention, with these queries.
        run: It computes the operation. Attention is called with (spec, q, k, v, document_ids).
        does: the needs of an `AttentionSpec` that it meets; layers with other needs never get it.
        label: what the log calls it, from queries and the number of key-value heads; None is `name`.
    """

    name: str
    applies: Callable[..., bool]
    run: Callable[..., Any]
    does: Collection[str] = ()
    label: Callable[[torch.Tensor, int], str] | None = None


KERNELS: dict[str, list[Kernel]] = {}
"""The rows of each operation; the first that applies is used."""


def register(operation: str, *kernels: Kernel) -> None:
    """Adds rows in front of those that the operation has."""
    KERNELS[operation] = [*kernels, *KERNELS.get(operation, [])]


def find_attention(operation: str, spec: AttentionSpec, q: torch.Tensor, documents: bool) -> Kernel:
    """The kernel for a layer that declares `spec`; a UserError if none does all of it. `documents`: there are ids."""
    needs, kernels = spec.needs(documents), [kernel for kernel in KERNELS[operation] if kernel.applies(q)]
    if documents and not spec.documents:
        raise spec.refusal(["documents"], "contradicts a batch with document ids (training.document_mask)")
    for kernel in kernels:
        if all(need in kernel.does for need in needs):
            return kernel
    names = ", ".join(kernel.name for kernel in kernels)
    raise spec.refusal(needs, f"no kernel for {operation} in {q.dtype} on {q.device.type} does (known: {names})")
