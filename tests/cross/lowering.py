"""What the compiler makes of the training code for a GPU, on a machine without one: lowered code, not timings.

`start` turns a process of its own into one with a simulated GPU, on which fake CUDA tensors can be trained:
nothing is computed, but everything that is traced, lowered and generated is what a GPU would get. Needs the `triton`
package beside any build of torch, and a C++ compiler. A GPU that is there is not touched.
"""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan.hardware import GPUS, Gpu

SOURCE = Path(__file__).with_name("simulated_gpu.cpp")
SIMULATED = {"sm_{}{}".format(*gpu.capability): gpu for gpu in GPUS.values() if gpu.chip and gpu.capability}
"""By architecture, as compilers name it."""


def start(gpu: Gpu) -> None:
    """Gives this process a simulated GPU. Call it before torch is imported. Raises a RuntimeError if it was, or there
    is no `triton` or no C++ compiler."""
    from torchtitan.kernels.cpp_extension import load_library

    assert gpu.capability is not None and gpu.chip is not None
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported before the simulated GPU")
    spec = find_spec("torch")
    root = Path(spec.origin or "").parent if spec else Path()
    flags = [f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib", "-O1"]
    # Where the C++ library is linked statically, torch's libraries must not find parts of it here before their own.
    flags.append("-Wl,--exclude-libs,ALL")
    if (root / "lib" / "libtorch_cuda.so").exists():
        flags += ["-Wl,--no-as-needed", "-ltorch_cuda"]  # a build for CUDA, which must be replaced by the simulated GPU
    if load_library(SOURCE, "the simulated GPU", *flags) is None:
        raise RuntimeError("the simulated GPU cannot be compiled and loaded; is there a C++ compiler?")
    # Variables, since settings hold in one thread only, and backward passes are compiled in another.
    (major, minor), (multiprocessors, shared_memory, l2_bytes) = gpu.capability, gpu.chip
    os.environ["SIMULATED_CAPABILITY"] = str(major)  # read when torch chooses a kernel for attention
    os.environ |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    from compiler import simulate

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

    choose = attention_gpu._torchs_choice

    def choose_by_fake_tensors(*arguments: Any) -> str:
        with FakeTensorMode():
            return choose(*arguments)

    attention_gpu._torchs_choice = choose_by_fake_tensors  # type: ignore[assignment]
