"""The device a process computes on, and its properties."""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from torchtitan.errors import nearest
from torchtitan.logging import logger

HAS_TRITON = find_spec("triton") is not None  # for our kernels on GPUs; torch for CUDA comes with it on Linux
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

# From oneDNN's developer guide, "CPU dispatcher control".
ONEDNN_ISAS = [
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16", "AVX10_1_512", "AVX10_1_512_AMX"),
    *("AVX10_1_512_AMX_FP16", "AVX10_2_512", "AVX10_2_512_AMX_2", "ALL", "DEFAULT"),
]


@dataclass(frozen=True)
class Device:
    """One process's device.

    Attributes:
        type: "cuda" or "cpu".
        name: hardware name, such as "NVIDIA H100 80GB HBM3".
        torch_device: includes the index of this process's GPU.
    """

    type: str
    name: str
    torch_device: torch.device

    @property
    def backend(self) -> str:
        """torch.distributed backend. On GPUs, gloo handles tensors in host memory beside NCCL."""
        return "cpu:gloo,cuda:nccl" if self.type == "cuda" else "gloo"

    def memory_capacity_bytes(self) -> int:
        if self.type == "cuda":
            return torch.cuda.get_device_properties(self.torch_device).total_memory
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            limit = CONTAINER_LIMIT.read_text().strip()
        except OSError:
            return installed
        return min(installed, int(limit)) if limit.isdecimal() else installed

    def peak_memory_bytes(self) -> int:
        """Peak memory so far: of torch's allocator on a GPU, of the process on CPU."""
        if self.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        if self.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


def find_device(local_rank: int) -> Device:
    """The GPU with this process's local rank, or the CPU if there are no GPUs; initialized."""
    if not torch.cuda.is_available():
        _keep_freed_memory()
        _warn_of_unknown_isa()
        return Device("cpu", _cpu_name(), torch.device("cpu"))
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    _end_expandable_segments_where_they_fail(device)
    return Device("cuda", torch.cuda.get_device_name(device), device)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """For a tensor that another stream has allocated: its memory is not handed on, once the tensor is gone, before the
    current stream has done what it was given until then."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


def _end_expandable_segments_where_they_fail(device: torch.device) -> None:
    """Expandable segments, which run_train.sh asks for, need a driver with virtual memory; some sandboxes have none."""
    try:
        torch.empty(2**22, device=device)
    except RuntimeError:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.empty(2**22, device=device)


def _keep_freed_memory() -> None:
    """Makes glibc reuse the memory of freed tensors.

    By default it returns the memory to the system and gets it back page by page: 20,000 to 30,000 page faults in each
    step of the debug model, as counted by `getrusage`. Peak memory stays the same.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):  # not glibc
        return
    trim_threshold, mmap_threshold = -1, -3  # from mallopt(3)
    libc.mallopt(mmap_threshold, 2**30)
    libc.mallopt(trim_threshold, -1)


def _warn_of_unknown_isa() -> None:
    """oneDNN silently ignores an unknown name and uses every instruction set of the CPU."""
    name = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if name and name.upper() not in ONEDNN_ISAS:
        logger.warning(
            f"ONEDNN_MAX_CPU_ISA = {name} has no effect: oneDNN knows no such name{nearest(name, ONEDNN_ISAS)}"
        )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()
