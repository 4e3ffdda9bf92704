"""The device a process computes on, and its properties."""

import contextlib
import ctypes
import functools
import os
import platform
import resource
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

from torchtitan.container import available_cores, memory_bytes
from torchtitan.errors import UserError, counted, nearest
from torchtitan.hardware import SHARING, ranks_may_share_gpus
from torchtitan.logging import logger

HAS_TRITON = find_spec("triton") is not None  # for our kernels on GPUs; torch for CUDA comes with it on Linux
THREADS = Path("/proc/self/task")
BUSY = 0.2  # threads that wait for a core, on average
NVIDIA_DEVICES = Path("/dev")
SHARING_NCCL = 23000  # 2.30.0, as `ncclGetVersion` spells it: earlier ones refuse a second rank on a GPU

# Source: oneDNN's developer guide, "CPU dispatcher control".
ONEDNN_ISAS = [
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16", "AVX10_1_512", "AVX10_1_512_AMX"),
    *("AVX10_1_512_AMX_FP16", "AVX10_2_512", "AVX10_2_512_AMX_2", "ALL", "DEFAULT"),
]


@dataclass(frozen=True)
class Device:
    """One process's device: type, hardware name ("NVIDIA H100 80GB HBM3"), `torch_device` with the GPU's index, and
    whether other ranks of this machine are on the same GPU, or another one."""

    type: str
    name: str
    torch_device: torch.device
    is_shared: bool = False

    @property
    def backend(self) -> str:
        """torch.distributed backend. On GPUs, gloo handles tensors in host memory beside NCCL."""
        return "cpu:gloo,cuda:nccl" if self.type == "cuda" else "gloo"

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """NVIDIA's, such as (9, 0); None of another device, also where AMD's torch counts one."""
        is_nvidia = self.type == "cuda" and torch.version.hip is None
        return torch.cuda.get_device_capability(self.torch_device) if is_nvidia else None

    @property
    def amd(self) -> str:
        """AMD's name of a GPU's architecture, such as "gfx942"; empty for another device."""
        is_amd = self.type == "cuda" and torch.version.hip is not None
        return str(torch.cuda.get_device_properties(self.torch_device).gcnArchName) if is_amd else ""

    def memory_capacity_bytes(self) -> int:
        if self.type == "cuda":
            return torch.cuda.get_device_properties(self.torch_device).total_memory
        return memory_bytes()

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
    """The GPU with this process's local rank (modulo their number where ranks share GPUs), or the CPU if there are no
    GPUs; initialized. Raises a UserError if this torch cannot use the GPUs, there are fewer than processes, or there is
    no C compiler, which Triton needs."""
    if not torch.cuda.is_available():
        _refuse_unusable_gpus()
        _keep_freed_memory()
        _warn_of_unknown_isa()
        if "OMP_NUM_THREADS" not in os.environ:  # torch has counted cores, but no quota
            torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
        name = _cpuinfo("model name") or platform.processor() or platform.machine()
        return Device("cpu", name, torch.device("cpu"))
    _require_compiler()
    gpus, shares = torch.cuda.device_count(), ranks_may_share_gpus()
    if local_rank >= gpus and not shares:
        raise UserError(
            f"LOCAL_RANK={local_rank}, but this process sees {counted(gpus, 'GPU')}: start one process per GPU at "
            f"most, and unset LOCAL_RANK for a run of one. In a test, ranks may share a GPU: {SHARING}=1."
        )
    if gpus > 1 and "RANK" in os.environ and "LOCAL_RANK" not in os.environ:
        raise UserError(
            "RANK is set, but LOCAL_RANK, which chooses one of this machine's GPUs, is not: set it, or start with "
            "./run_train.sh or torchrun."
        )
    is_shared = shares and max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > gpus
    if is_shared:
        _require_nccl_that_shares()
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    _end_expandable_segments_where_they_fail(device)
    return Device("cuda", torch.cuda.get_device_name(device), device, is_shared)


def _refuse_unusable_gpus() -> None:
    """A driver that is too old, or a torch for CPUs, must not silently make a run train on the CPU."""
    if not any(NVIDIA_DEVICES.glob("nvidia[0-9]*")) or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return
    reason = f"torch {torch.__version__} is built without CUDA"
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
    raise UserError(
        f"this machine has NVIDIA GPUs, but torch cannot use them: {reason}. Fix that, or set CUDA_VISIBLE_DEVICES= "
        "(empty) to train on the CPU."
    )


def _require_nccl_that_shares() -> None:
    version = _nccl_version()
    if version is not None and version < SHARING_NCCL:
        raise UserError(
            f"{SHARING}=1 needs NCCL 2.30 or later, but this torch has {version // 10000}.{version // 100 % 100}; put "
            "a later libnccl.so.2 into LD_PRELOAD (scripts/carry_for_gpu.sh makes one)."
        )


def _nccl_version() -> int | None:
    """The version of the loaded library, 23004 for 2.30.4; torch only tells which one it was compiled for. None if NCCL
    is linked into torch."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value


def _require_compiler() -> None:
    """Triton compiles the launcher of each kernel with a C compiler; even an uncompiled run has such kernels."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if compiler is None or not header.exists():
        missing = f"the headers of Python ({header})" if compiler else "a C compiler (gcc)"
        package = f"python{sysconfig.get_python_version()}-dev" if compiler else "gcc"
        raise UserError(f"a run on a GPU needs {missing}, with which Triton builds its kernels; install {package}.")


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """For a tensor of another stream: its memory is not reused before the current stream has done its work so far."""
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
    """Makes glibc reuse the memory of freed tensors. By default it returns it to the system and gets it back page by
    page: 20,000 to 30,000 page faults in a step of the debug model, by `getrusage`. Peak memory stays the same."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):  # not glibc
        return
    trim_threshold, mmap_threshold = -1, -3  # constants of mallopt(3)
    libc.mallopt(mmap_threshold, 2**30)
    libc.mallopt(trim_threshold, -1)


def onednn_limit() -> str:
    """The instruction set that ONEDNN_MAX_CPU_ISA limits oneDNN to, one of `ONEDNN_ISAS`."""
    name = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return name if name in ONEDNN_ISAS else "DEFAULT"


def _warn_of_unknown_isa() -> None:
    """oneDNN silently ignores an unknown name and uses every instruction set of the CPU."""
    name = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if name and name.upper() not in ONEDNN_ISAS:
        logger.warning(
            f"ONEDNN_MAX_CPU_ISA = {name} has no effect: oneDNN knows no such name{nearest(name, ONEDNN_ISAS)}"
        )


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU under Linux's names; empty on other systems."""
    return frozenset(f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split())  # on x86; on ARM


def _cpuinfo(field: str) -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
    except OSError:
        return ""


class CoreMeter:
    """Tells whether other processes use the cores that this one's threads need."""

    def __init__(self) -> None:
        self.since, self.delay = perf_counter(), _seconds_without_a_core()

    def threads_waiting(self) -> float:
        """How many threads of this process, on average since the last call, were ready to run but had no core."""
        since, delay = self.since, self.delay
        self.since, self.delay = perf_counter(), _seconds_without_a_core()
        return (self.delay - delay) / (self.since - since)


def _seconds_without_a_core() -> float:
    """Total over this process's threads; 0 where the system does not say."""
    total = 0
    with contextlib.suppress(OSError):
        for task in THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9
