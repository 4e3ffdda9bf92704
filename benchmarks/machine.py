"""The machine that produced a table: its name, versions, and GEMM rate.

python -m benchmarks machine [--threads N] [--sizes 1024,2048]      prints one JSON object

Scripts that start training runs measure it in a separate process, so that they stay small themselves: Linux includes
the parent's memory at the fork in a child's peak.
"""

import argparse
import contextlib
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CPU_SIZES = (1024, 2048, 4096)
GPU_SIZES = (4096, 8192, 16384)
REPETITIONS = 5  # on CPU; ten times as many on a GPU, timed together
SECONDS_FOR_A_SIZE = 2.0


@dataclass(frozen=True)
class Machine:
    """Where a table was produced.

    Attributes:
        device: name of the GPU or CPU.
        kind: "cuda" or "cpu".
        cores: number of cores that this process may use.
        threads: used for the CPU's GEMMs.
        versions: of Python, torch, torchao and CUDA.
        dtype: of these GEMMs: bfloat16, or float32 on a CPU where it is faster.
        gemm_rate: FLOP/s of the best of several large square GEMMs, of one GPU or of all those threads.
        gemm_rates: the same by size.
        datasheet_rate: of a known GPU, dense.
    """

    device: str
    kind: str
    cores: int
    threads: int
    versions: dict[str, str]
    dtype: str
    gemm_rate: float
    gemm_rates: dict[str, float]
    datasheet_rate: float | None

    def __str__(self) -> str:
        threads = f"{self.cores} cores, {self.threads} threads, " if self.kind == "cpu" else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        sizes = ", ".join(f"{size}: {tera(rate)}" for size, rate in self.gemm_rates.items())
        sheet = f"; data sheet {tera(self.datasheet_rate)}" if self.datasheet_rate else ""
        rate = f"{self.dtype} GEMMs, measured: {tera(self.gemm_rate)} TFLOP/s ({sizes}){sheet}"
        return f"{self.device}, {threads}{versions}; {rate}"


def tera(rate: float) -> str:
    return f"{rate / 1e12:.0f}" if rate >= 1e13 else f"{rate / 1e12:.3f}"


def measure_machine(threads: int | None = None, sizes: tuple[int, ...] = ()) -> Machine:
    """Measures in this process. `threads`: torch's CPU threads; None: unchanged. `sizes`: of the GEMMs, if not the
    default."""
    import torch

    from torchtitan.container import available_cores
    from torchtitan.device import find_device
    from torchtitan.kernels.cpu_speed import fast_dtype
    from torchtitan.metrics.flops import known_peak

    if threads:
        torch.set_num_threads(threads)
    device = find_device(0)
    dtype = torch.bfloat16 if device.type == "cuda" else fast_dtype()
    rates = gemm_rates(device.torch_device, dtype, sizes)
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(PackageNotFoundError):
        versions["torchao"] = version("torchao")
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
    return Machine(
        device.name,
        device.type,
        available_cores(),
        torch.get_num_threads(),
        versions,
        str(dtype).removeprefix("torch."),
        max(rates.values()),
        rates,
        known_peak(device.name) if device.type == "cuda" else None,
    )


def gemm_rates(device: Any, dtype: Any, sizes: tuple[int, ...] = ()) -> dict[str, float]:
    """FLOP/s of square GEMMs by size: the best of several on CPU, the mean of many on a GPU.

    The data are normally distributed, because a GPU is faster with zeros, which draw less power.
    """
    import torch

    rates = {}
    for size in sizes or (GPU_SIZES if device.type == "cuda" else CPU_SIZES):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for _ in range(3):
            a @ b
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10 * REPETITIONS):
                a @ b
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3 / (10 * REPETITIONS)
        else:
            seconds, began = float("inf"), perf_counter()
            for _ in range(REPETITIONS):
                start_time = perf_counter()
                a @ b
                now = perf_counter()
                seconds = min(seconds, now - start_time)
                if now - began > SECONDS_FOR_A_SIZE:
                    break
        rates[f"{size}"] = 2 * size**3 / seconds
    return rates


def ask(threads: int | None = None, sizes: str = "") -> Machine:
    """`measure_machine` in a separate process."""
    flags = ([f"--threads={threads}"] if threads else []) + ([f"--sizes={sizes}"] if sizes else [])
    command = [sys.executable, str(Path(__file__).resolve()), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sizes", default="", help="sizes of the GEMMs, comma-separated")
    arguments = parser.parse_args()
    sizes = tuple(int(size) for size in arguments.sizes.split(",") if size)
    print(json.dumps(asdict(measure_machine(arguments.threads, sizes))))


if __name__ == "__main__":
    main()
