"""Model FLOPs per token and the peak FLOP/s of devices: the two halves of model FLOPs utilization (MFU)."""

import math
from dataclasses import dataclass
from time import perf_counter

import torch

from torchtitan.cache import cache_result, cached_results
from torchtitan.hardware import GPUS, find_gpu
from torchtitan.protocols import ModelArgs, attended_channels

MEASURED_PEAKS = "measured_peaks.json"
MEASUREMENTS = 5  # per run, each of
MEASUREMENT_SECONDS = 0.05
MORE = 10  # further ones, if the run was faster than all of them


@dataclass
class Peak:
    """The reference for MFU: FLOP/s of one device, and where the number comes from, for messages."""

    flops: float
    source: str

    @property
    def uncertain(self) -> bool:
        """Whether `measure` may find a higher peak."""
        return False

    def measure(self) -> None:
        """Does nothing for a peak from a data sheet."""

    def mfu(self, rate: float) -> float | None:
        """MFU of a run at `rate` FLOP/s."""
        return rate / self.flops


class MeasuredPeak(Peak):
    """A CPU's peak: the fastest of several GEMMs, in this run and in earlier ones with the same CPU, threads and dtype.
    The maximum is right, since other load on the machine can only slow a measurement down."""

    def __init__(self, device_name: str, dtype: torch.dtype) -> None:
        super().__init__(0.0, "")
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")
        self.key = f"{device_name} | {torch.get_num_threads()} threads | {self.name}"
        cached = cached_results(MEASURED_PEAKS).get(self.key)
        self.earlier = cached if isinstance(cached, float) and 0 < cached < math.inf else 0.0
        self.now = self.reached = 0.0
        self.left = MEASUREMENTS
        self.measure()

    @property
    def uncertain(self) -> bool:
        return self.left > 0 or (self.reached > self.flops and self.left > -MORE)

    def measure(self) -> None:
        self.left -= 1
        self.now = max(self.now, measure_peak(self.dtype, MEASUREMENT_SECONDS))
        self.flops = max(self.now, self.earlier)
        self.source = f"{self.name} GEMM, measured"
        if self.now < 0.7 * self.earlier:
            self.source += f" in an earlier run; {self.now / self.earlier:.0%} of that now, so the machine is busy"
        if self.now > self.earlier:
            cache_result(MEASURED_PEAKS, self.key, self.now)

    def mfu(self, rate: float) -> float | None:
        """None while the run is faster than all measurements: the MFU of a peak known to be too low would be wrong."""
        self.reached = max(self.reached, rate)
        return rate / self.flops if self.reached <= self.flops else None


def find_peak(device_type: str, device_name: str, dtype: torch.dtype) -> Peak | None:
    """The peak of one device for GEMMs in `dtype`; None if unknown, as for float32 on a GPU. A CPU's is measured, and
    again by `Peak.measure`. As is customary, float8 and int8 training count against bf16: MFUs stay comparable."""
    if device_type == "cpu":
        return MeasuredPeak(device_name, dtype)
    flops = known_peak(device_name) if dtype == torch.bfloat16 else None
    return None if flops is None else Peak(flops, f"{device_name}, bf16 dense")


def known_peak(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU of the table, or None."""
    if " MIG " in device_name:  # a slice of the device; the name does not say what fraction of the peak it has
        return None
    key = find_gpu(device_name)
    return GPUS[key].bf16_flops if key else None


def measure_peak(dtype: torch.dtype, budget_seconds: float = 0.1) -> float:
    """FLOP/s of the fastest of several square GEMMs on this CPU, with torch's current number of threads. Sizes double
    while the next GEMM is likely to fit into the remaining budget; then the largest is repeated."""
    best, size, repetitions = 0.0, 256, 0
    matrix = torch.ones(size, size, dtype=dtype)
    torch.mm(matrix, matrix)  # the first call loads kernels and starts threads
    now = perf_counter()
    end = now + budget_seconds
    while repetitions < 3 or now < end:
        start = perf_counter()
        torch.mm(matrix, matrix)
        now = perf_counter()
        seconds = now - start
        best = max(best, 2 * size**3 / seconds)
        repetitions += 1
        # GEMMs up to about 2048 come closer to the peak; doubling is eight times the work, so leave time to repeat it.
        if size < 2048 and now + 3 * 8 * seconds < end:
            size *= 2
            matrix = torch.ones(size, size, dtype=dtype)
        elif repetitions >= 3 and now + seconds > end:
            break
    return best


def attended_positions(args: ModelArgs, seq_len: int) -> float:
    """`AttentionSpec.positions`, summed over layers."""
    return sum(args.attention_spec(layer).positions(seq_len) for layer in range(args.n_layers))


def flops_per_token(num_params_without_embedding: int, args: ModelArgs, seq_len: int) -> float:
    """FLOPs of forward and backward per token: 6 N + 12 L H Dh S, where a window lowers S (`attended_positions`).

    This is PaLM's formula (Chowdhery et al. 2022, appendix B), the field's convention: a multiply-add is two FLOPs, the
    backward pass costs twice the forward, N excludes the embedding table (a lookup) but not the output projection, and
    attention counts as if every token attended to the whole sequence. Causal attention needs only half of that term,
    6 L H Dh S. Recomputation (activation checkpointing) is not counted, since it is no progress.

    Args:
        num_params_without_embedding: N of the full model, not of one rank's shard.
        args: Their query heads count, also under grouped-query attention; Dh is the mean of the widths of a head's
            queries and values.
    """
    attention = 12.0 * attended_channels(args) * attended_positions(args, seq_len)
    return 6.0 * num_params_without_embedding + attention


def describe_mfu(peak: Peak | None) -> str:
    """One line for the startup log."""
    if peak is None:
        return "MFU is unknown: no peak FLOP/s is known for this device and dtype"
    teraflops = peak.flops / 1e12
    figure = f"{teraflops:.0f}" if teraflops >= 10 else f"{teraflops:.3g}"
    return f"MFU counts 6N plus full attention; peak {figure} TFLOP/s ({peak.source})"
