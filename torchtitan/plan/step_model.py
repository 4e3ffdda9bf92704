"""Where the time of a training step would go on a GPU: counted work over measured rates. Needs no torch."""

from dataclasses import dataclass, field

from torchtitan.hardware import GPUS


@dataclass(frozen=True)
class Rates:
    """Of one GPU, for large sizes.

    Attributes:
        gemm: FLOP/s by the kind of numbers: "bf16", "float8", "int8", "float32", "mxfp8", "nvfp4".
        attention: FLOP/s of the forward and of the backward pass; causal attention counts half.
        bandwidth: bytes/s read and written.
    """

    gemm: dict[str, float]
    attention: tuple[float, float]
    bandwidth: float


def _hopper(bandwidth: float, gemm: float, gain: float, attention: float) -> Rates:
    """
    Args:
        gemm: FLOP/s of bf16 GEMMs.
        gain: of 8-bit GEMMs over that.
        attention: gain over FlashAttention-2, which reaches 35% of an H100's peak (arXiv 2407.08608, abstract), in the
            backward pass by assumption 28%.
    """
    kinds = {"bf16": gemm, "float8": gain * gemm, "int8": gain * gemm, "float32": 67e12}  # float32: data sheet
    return Rates(kinds, (attention * 0.35 * 989e12, attention * 0.28 * 989e12), bandwidth)


# Slow, typical and fast. Published: 620 to 690 TFLOP/s in bf16, sustained at 700 W (a burst reaches 798); 8-bit GEMMs
# 1.4 to 1.7 times as fast on H200; cuDNN's attention, which torch 2.11 for CUDA 13 and later take, 1.7 to 2.3 times as
# fast as FlashAttention-2 (transformers #48163). Bandwidth: measured with torch 2.11.0.
_SLOW, _TYPICAL, _FAST = (620e12, 1.4, 1.7), (655e12, 1.55, 2.0), (690e12, 1.7, 2.3)
_BANDWIDTHS = {name: gpu.copied for name, gpu in GPUS.items() if gpu.copied}
RATES = {gpu: _hopper(bandwidth, *_TYPICAL) for gpu, bandwidth in _BANDWIDTHS.items()}
RANGES = {gpu: (_hopper(bandwidth, *_SLOW), _hopper(bandwidth, *_FAST)) for gpu, bandwidth in _BANDWIDTHS.items()}
COLLECTIVES_SHARE = 16 / 132  # of the multiprocessors, which NCCL takes from computation; by assumption


@dataclass(frozen=True)
class Expected:
    """What a step is expected to take.

    Attributes:
        parts: seconds by part, which add up to the step, at typical rates.
        range: seconds at fast and at slow rates.
        mfu: with attention counted in full, and half of it (causal); 0 to 1.
        kernels: launches of generated kernels.
    """

    parts: dict[str, float]
    range: tuple[float, float]
    mfu: tuple[float, float]
    kernels: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass
class Work:
    """What one rank computes in a step.

    Attributes:
        gemms: FLOPs by the kind of numbers.
        attention: FLOPs of forward and backward passes; causal attention counts half.
        fused_bytes: read and written by generated kernels.
        other_bytes: read and written by uncompiled operations other than GEMMs and updates.
        update_bytes: read and written by the optimizer and by clipping.
        kernels: launches of generated kernels.
    """

    gemms: dict[str, float] = field(default_factory=dict)
    attention: tuple[float, float] = (0.0, 0.0)
    fused_bytes: float = 0.0
    other_bytes: float = 0.0
    update_bytes: float = 0.0
    kernels: float = 0.0

    def __sub__(self, other: "Work") -> "Work":
        return self.plus(other, -1.0)

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        """This work and `times` another."""
        kinds = self.gemms.keys() | other.gemms.keys()
        return Work(
            {kind: self.gemms.get(kind, 0.0) + times * other.gemms.get(kind, 0.0) for kind in sorted(kinds)},
            (
                self.attention[0] + times * other.attention[0],
                self.attention[1] + times * other.attention[1],
            ),
            self.fused_bytes + times * other.fused_bytes,
            self.other_bytes + times * other.other_bytes,
            self.update_bytes + times * other.update_bytes,
            self.kernels + times * other.kernels,
        )


def seconds_by_part(work: Work, rates: Rates, waited: float = 0.0, beside: float = 0.0) -> dict[str, float]:
    """Seconds of a step by part. They add up: a GPU runs one large kernel at a time.

    Args:
        waited: seconds of collectives that computation waits for.
        beside: seconds of collectives that run beside computation: what exceeds it counts, and what they take from it.
    """
    parts = {f"{kind} GEMMs": flops / rates.gemm[kind] for kind, flops in work.gemms.items()}
    parts["attention"] = work.attention[0] / rates.attention[0] + work.attention[1] / rates.attention[1]
    parts["fused kernels"] = work.fused_bytes / rates.bandwidth
    parts["uncompiled operations"] = work.other_bytes / rates.bandwidth
    parts["optimizer"] = work.update_bytes / rates.bandwidth
    computation = sum(parts.values())
    parts["collectives"] = waited + max(0.0, beside - computation) + COLLECTIVES_SHARE * min(beside, computation)
    return parts
