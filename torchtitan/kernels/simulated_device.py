"""The device of a plan: what modules see in place of the CPU on which its fake tensors seem to be."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from torchtitan.kernels.dispatch import KERNELS, SIMULATED, Kernel


@contextlib.contextmanager
def simulated_device(device: str, tensor_class: type[torch.Tensor], rows: Mapping[str, list[Kernel]]) -> Iterator[None]:
    """Within this context tensors on CPU stand for those of a device of this type, and `rows` replace the table's.

    Args:
        tensor_class: of tensors without memory, which no kernel of ours reads or writes.
    """
    former = {operation: KERNELS[operation] for operation in rows}
    SIMULATED.append((device, tensor_class))
    KERNELS.update(rows)
    try:
        yield
    finally:
        SIMULATED.pop()
        KERNELS.update(former)
