"""Which device a process computes on, and what it can tell about itself."""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """One process's device.

    Attributes:
        type: "cuda" or "cpu".
        name: of the hardware, such as "NVIDIA H100 80GB HBM3".
        torch_device: with the index of this process's GPU.
    """

    type: str
    name: str
    torch_device: torch.device

    @property
    def backend(self) -> str:
        """torch.distributed's backend. Beside NCCL, gloo serves tensors in host memory."""
        return "cpu:gloo,cuda:nccl" if self.type == "cuda" else "gloo"

    def memory_capacity_bytes(self) -> int:
        if self.type == "cuda":
            return torch.cuda.get_device_properties(self.torch_device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_memory_bytes(self) -> int:
        """Most memory held so far: by torch's allocator on a GPU, by the whole process on CPU."""
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
    """The GPU with this process's local rank where there are GPUs, the CPU otherwise; made ready."""
    if not torch.cuda.is_available():
        _keep_freed_memory()
        return Device("cpu", _cpu_name(), torch.device("cpu"))
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return Device("cuda", torch.cuda.get_device_name(device), device)


def _keep_freed_memory() -> None:
    """Tells glibc to keep the memory of freed tensors for the next ones.

    It would return it to the system and get it back page by page: 20,000 to 30,000 faults in each step of the debug
    model, which `getrusage` counts. The most that a run holds at once stays the same.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):  # another libc
        return
    trim_threshold, mmap_threshold = -1, -3  # mallopt(3)
    libc.mallopt(mmap_threshold, 2**30)
    libc.mallopt(trim_threshold, -1)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()
