"""What the compiler makes of the training code for a GPU, on a machine without one: lowered code, not timings.

`start` turns a process of its own into one with a simulated GPU, on which fake CUDA tensors can be trained:
nothing is computed, but everything that is traced, lowered and generated is what a GPU would get. Needs the `triton`
package beside any build of torch, and a C++ compiler. A GPU that is there is not touched.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan.hardware import GPUS, Gpu

SOURCE = Path(__file__).with_name("simulated_gpu.cpp")


SIMULATED = {"sm_{}{}".format(*gpu.capability): gpu for gpu in GPUS.values() if gpu.chip and gpu.capability}
"""By architecture, as compilers name it."""


@dataclass(frozen=True)
class Operand:
    """Of an operator that is called in place of a kernel."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: str


@dataclass(frozen=True)
class Call:
    """An operator that lowered code calls: a GEMM, attention, a collective."""

    operator: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Lowered:
    """One lowered graph.

    Attributes:
        code: the generated Python code, with its Triton kernels.
        backward: whether it is the backward pass of another.
        bytes: that kernels and calls read and write, as the compiler counts them.
        kernels: launches of Triton kernels.
        calls: in the order in which they run.
        masks: shapes of boolean tensors that may be masks of queries x keys, whether or not they reach memory.
    """

    code: str
    backward: bool
    bytes: int
    kernels: int
    calls: tuple[Call, ...]
    masks: tuple[tuple[int, ...], ...]

    @property
    def is_block(self) -> bool:
        """Whether it has GEMMs, as transformer blocks have, unlike other compiled code."""
        return any("mm" in call.operator for call in self.calls)


MASK = range(1024, 2**16)  # queries and keys of a mask


def start(gpu: Gpu) -> None:
    """Gives this process a simulated GPU. Call it before torch is imported. Raises a RuntimeError if it was, or there
    is no `triton` or no C++ compiler."""
    import importlib.util
    import sys

    from torchtitan.kernels.cpp_extension import load

    assert gpu.capability is not None and gpu.chip is not None
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported before the simulated GPU")
    found = importlib.util.find_spec("torch")
    root = Path(found.origin or "").parent if found else Path()
    flags = [f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib", "-O1"]
    # Where the C++ library is linked statically, torch's libraries must not find parts of it here before their own.
    flags.append("-Wl,--exclude-libs,ALL")
    if (root / "lib" / "libtorch_cuda.so").exists():
        flags += ["-Wl,--no-as-needed", "-ltorch_cuda"]  # a build for CUDA, which must be replaced by the simulated GPU
    if load(SOURCE, "the simulated GPU", *flags) is None:
        raise RuntimeError("the simulated GPU cannot be compiled and loaded; is there a C++ compiler?")
    # Variables, since settings hold in one thread only, and backward passes are compiled in another.
    (major, minor), (multiprocessors, shared_memory, l2_bytes) = gpu.capability, gpu.chip
    os.environ["SIMULATED_CAPABILITY"] = str(major)  # read when torch chooses a kernel for attention
    os.environ |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    from torchtitan.compat.lowering import simulate

    properties = SimpleNamespace(  # the attributes of `torch.cuda.get_device_properties()`
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=multiprocessors,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared_memory,
        shared_memory_per_multiprocessor=shared_memory + 1024,
        L2_cache_size=l2_bytes,
        gcnArchName="",
        is_integrated=False,
        clock_rate=1980000,
        memory_clock_rate=3201000,
        memory_bus_width=6144,
    )
    limits_of_triton = {
        "max_shared_mem": shared_memory,
        "multiprocessor_count": multiprocessors,
        "max_num_regs": 65536,
        "warpSize": 32,
    }
    simulate(properties, limits_of_triton)
    from torchtitan.compat.dispatch import FakeTensorMode
    from torchtitan.kernels import attention_gpu

    attention_gpu.probes = FakeTensorMode


def record() -> list[Lowered]:
    """A list to which each graph is added that the compiler lowers from now on."""
    from torchtitan.compat.lowering import bytes_of, on_lowered

    found: list[Lowered] = []

    def take(graph: Any, code: str) -> None:
        found.append(
            Lowered(
                code,
                bool(graph.is_backward),
                sum(map(bytes_of, graph.scheduler.nodes)),
                len(re.findall(r"^\s+\w+\.run\(", code, re.M)),
                tuple(_calls(graph)),
                tuple(_masks(graph)),
            )
        )

    on_lowered(take)
    return found


def _calls(graph: Any) -> Iterator[Call]:
    from torchtitan.compat.lowering import operator_of

    for node in graph.scheduler.nodes:
        operator = operator_of(node)
        if operator is not None:
            operands = [
                Operand(
                    tuple(_number(size) for size in operand.get_size()),
                    tuple(_number(stride) for stride in operand.get_stride()),
                    str(operand.get_dtype()).removeprefix("torch."),
                )
                for operand in node.node.inputs
                if hasattr(operand, "get_stride") and operand.maybe_get_layout() is not None
            ]
            yield Call(operator, tuple(operands))


def _masks(graph: Any) -> Iterator[tuple[int, ...]]:
    import torch

    for node in graph.orig_gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            shape = tuple(_number(size) for size in value.shape)
            if is_mask(shape):
                yield shape


def is_mask(shape: Sequence[Any]) -> bool:
    return len(shape) >= 2 and all(not isinstance(size, int) or size in MASK for size in shape[-2:])


def _number(size: Any) -> Any:
    """A size as an int, or as text if it is symbolic."""
    try:
        return int(size)
    except (TypeError, ValueError):
        return str(size)


def spills(lowered: Lowered, all_configurations: bool = False) -> dict[str, str]:
    """Compiles the Triton kernels of lowered code for the simulated GPU.

    Args:
        all_configurations: those that would be timed against each other on the GPU; else only the first of each kernel.

    Returns:
        For each kernel that spills registers to local memory, by name, the resources that it uses.
    """
    from torchtitan.compat.lowering import binaries, resource_usage

    found = {}
    for name, kernel, source in kernels(lowered):
        for binary in binaries(source, kernel, all_configurations):
            usage = resource_usage(binary["cubin"])
            if spilled(usage):
                found[name] = " ".join(usage.split())
    return found


def kernels(lowered: Lowered) -> list[tuple[str, str, str]]:
    """The Triton kernels of lowered code: name there, name in the source, source."""
    return re.findall(r"(\w+) = async_compile\.triton\('(\w+)', '''(.*?)'''", lowered.code, re.S)


def spilled(usage: str) -> bool:
    """Whether a binary uses local memory, by what cuobjdump says."""
    local = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    return not local or any(map(int, local))
