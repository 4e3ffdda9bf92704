"""What lies between the GEMMs of a block on CPU, in bfloat16: each in one pass over memory (`pointwise.cpp`).

torch's operations take several passes. Results are equal bit by bit, so each caller falls back to them where there is
no C++ compiler, or for other dtypes.
"""

import ctypes
import functools

import torch

from torchtitan.compat.dynamo import is_compiling
from torchtitan.kernels.cpp_extension import call, isa_flags, load_library
from torchtitan.kernels.dispatch import device_type, has_no_memory

VECTOR_SIZE = 16  # sizes are multiples of a vector register
CLASSES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)  # others, such as fake tensors, have no memory


@functools.cache
def _library() -> ctypes.CDLL | None:
    """`pointwise.cpp`; None if it cannot be compiled."""
    flags = "-ffp-contract=off", f"-L{torch.__path__[0]}/lib", "-ltorch_cpu"
    return load_library("pointwise.cpp", "norms and gates", *isa_flags(), *flags)


def applies_to(*tensors: torch.Tensor) -> bool:
    """Whether these tensors use the CPU kernels; compiled code does not, since the compiler fuses as well."""
    if is_compiling():
        return False
    for x in tensors:
        plain = (type(x) in CLASSES or has_no_memory(x)) and device_type(x) == "cpu" and x.dtype == torch.bfloat16
        if not plain or x.shape[-1] % VECTOR_SIZE:
            return False
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and _library() is not None


def run_kernel(kernel: str, *arguments: torch.Tensor | int | float) -> None:
    """Calls a function of `pointwise.cpp`, except in a plan. Tensors must be contiguous."""
    if not any(map(has_no_memory, arguments)):
        call(getattr(_library(), kernel), *arguments)
