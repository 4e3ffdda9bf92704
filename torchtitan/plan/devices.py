"""Memory and bandwidths of known devices, for plans of runs on them."""

import re
from dataclasses import dataclass, replace

import torch

from torchtitan.device import Device
from torchtitan.errors import ConfigError, nearest
from torchtitan.metrics.flops import known_peak, measure_peak

DEFAULT = "H100"  # SXM


@dataclass(frozen=True)
class PlannedDevice:
    """Properties of a device as assumed by a plan. Bandwidths are in bytes/s in one direction; None if unknown.

    Attributes:
        type: "cuda" or "cpu".
        name: as `torch.cuda.get_device_name()` spells it, or shorter.
        memory_bytes: in total.
        within_node: from one device to another of the same machine, over all its links.
        between_nodes: a device's part of its machine's network bandwidth.
        compute_capability: of NVIDIA devices.
        peak_flops: FLOP/s in bf16 on a GPU, measured on CPU.
    """

    type: str
    name: str
    memory_bytes: int
    within_node: float | None = None
    between_nodes: float | None = None
    compute_capability: tuple[int, int] | None = None
    peak_flops: float | None = None


def _gpu(
    name: str, gibibytes: int, within: float, gigabits: float, capability: tuple[int, int] | None
) -> PlannedDevice:
    return PlannedDevice("cuda", name, gibibytes * 2**30, within * 1e9, gigabits * 1e9 / 8, capability)


# Memory and links (half of the bidirectional figure, GB/s): data sheets of NVIDIA A100, H100, H200, HGX B200 and AMD
# Instinct MI300X. Network (Gbit/s per GPU): NVIDIA's DGX A100, H100, H200 and B200 data sheets; 400 for MI300X
# platforms. Of an H200's 141 GB, 139 GiB are there for torch.
GPUS: dict[str, tuple[str, PlannedDevice]] = {
    "A100": (r"\bA100\b", _gpu("NVIDIA A100-SXM4-80GB", 80, 300, 200, (8, 0))),
    "H100": (r"\bH100\b(?! PCIe| NVL)", _gpu("NVIDIA H100 80GB HBM3", 80, 450, 400, (9, 0))),
    "H200": (r"\bH200\b(?! NVL)", _gpu("NVIDIA H200", 139, 450, 400, (9, 0))),
    "B200": (r"(?<!G)B200\b", _gpu("NVIDIA B200", 180, 900, 400, (10, 0))),
    "MI300X": (r"\bMI300X", _gpu("AMD Instinct MI300X", 192, 448, 400, None)),
}


def named_device(name: str) -> PlannedDevice:
    """Looks up a device in the table.

    Raises:
        ConfigError: there is no such name.
    """
    if name in GPUS:
        device = GPUS[name][1]
        return replace(device, peak_flops=known_peak(device.name))
    known = [*GPUS, "cpu"]
    raise ConfigError(
        f"job.simulate_device: unknown device {name!r}{nearest(name, known)}; known: {', '.join(known)}, or 'auto'."
    )


def this_device(device: Device, dtype: torch.dtype) -> PlannedDevice:
    """The device of this process. Link bandwidths are known for GPUs of the table."""
    if device.type == "cpu":
        memory = device.memory_capacity_bytes()
        return PlannedDevice("cpu", device.name, memory, peak_flops=measure_peak(dtype))
    known = next((gpu for pattern, gpu in GPUS.values() if re.search(pattern, device.name)), None)
    return PlannedDevice(
        "cuda",
        device.name,
        device.memory_capacity_bytes(),
        known.within_node if known else None,
        known.between_nodes if known else None,
        torch.cuda.get_device_capability(device.torch_device),
        known_peak(device.name),
    )
