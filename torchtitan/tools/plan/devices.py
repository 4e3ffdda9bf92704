"""The device of a plan, and lower bounds for the time of collectives between such devices."""

from dataclasses import dataclass

import torch

from torchtitan.device import Device
from torchtitan.errors import ConfigError, nearest
from torchtitan.hardware import GPUS, find_gpu
from torchtitan.metrics.flops import MeasuredPeak, known_peak
from torchtitan.parallel.dims import ParallelDims

DEFAULT = "H100"  # SXM
NODE = 8  # devices in a machine


@dataclass(frozen=True)
class PlannedDevice:
    """Properties of a device as assumed by a plan. Bandwidths are in bytes/s in one direction; None if unknown."""

    type: str
    name: str  # how `torch.cuda.get_device_name()` spells it, or shorter
    memory_bytes: int
    within_node: float | None = None  # bandwidth between two devices of a machine, over all links
    between_nodes: float | None = None  # a device's part of its machine's network bandwidth
    compute_capability: tuple[int, int] | None = None  # only NVIDIA's devices have one
    amd: str = ""  # the architecture of AMD's
    peak_flops: float | None = None  # FLOP/s in bf16 on a GPU, measured on CPU


def named_device(name: str) -> PlannedDevice:
    """The device of this name in the table. Raises a ConfigError if there is none."""
    gpu = GPUS.get(name)
    if gpu is not None and gpu.name:
        links = gpu.within_node, gpu.between_nodes
        return PlannedDevice("cuda", gpu.name, gpu.memory_bytes, *links, gpu.capability, peak_flops=gpu.bf16_flops)
    known = [*(key for key, gpu in GPUS.items() if gpu.name), "cpu"]
    raise ConfigError(
        f"job.simulate_device: unknown device {name!r}{nearest(name, known)}; known: {', '.join(known)}, or 'auto'."
    )


def this_device(device: Device, dtype: torch.dtype = torch.bfloat16) -> PlannedDevice:
    """The device of this process. Link bandwidths are known for GPUs of the table."""
    if device.type == "cpu":
        memory = device.memory_capacity_bytes()
        return PlannedDevice("cpu", device.name, memory, peak_flops=MeasuredPeak(device.name, dtype).flops)
    known = GPUS.get(find_gpu(device.name))
    links = (known.within_node, known.between_nodes) if known else (None, None)
    return PlannedDevice(
        "cuda",
        device.name,
        device.memory_capacity_bytes(),
        *links,
        device.compute_capability,
        device.amd,
        known_peak(device.name),
    )


def extent(dimension: str, dims: ParallelDims) -> tuple[int, int]:
    """Number of ranks in a group, and their stride."""
    within = dims.tp * dims.fsdp
    return {
        "tp": (dims.tp, 1),
        "cp": (dims.cp, dims.tp),
        "fsdp": (dims.fsdp, dims.tp),
        "ep": (dims.ep, 1),
        "expert_fsdp": (within // dims.ep, dims.ep),
        "dp_replicate": (dims.dp_replicate, within),
        "pp": (dims.pp, within * dims.dp_replicate),
        "stage": (within * dims.dp_replicate, 1),
    }.get(dimension, (dims.world_size, 1))


def link_bytes(collective: str, size: float, ranks: int, stride: int) -> tuple[float, float]:
    """What collectives of `size` bytes in total must move in one direction over a rank's links within its machine, and
    over its part of the machine's network.

    In an all-gather a rank receives everything except its own shard, and a machine everything except its ranks' shards,
    over the network links of those ranks. A reduce-scatter is the reverse; an all-reduce is both.
    """
    in_node = max(1, min(ranks, NODE // stride))
    if collective in ("send", "receive"):
        return (size, 0.0) if in_node == ranks else (0.0, size)
    if collective == "all-to-all":
        return size * (in_node - 1) / ranks, size * (ranks - in_node) / ranks
    passes = 2 if collective == "all-reduce" else 1
    within = size * (ranks - 1) / ranks if in_node > 1 else 0.0
    return passes * within, passes * size * (ranks - in_node) / ranks / in_node


def min_seconds(within: float, between: float, device: PlannedDevice) -> float | None:
    """A lower bound for the time of moving these bytes, of `link_bytes`; None if bandwidths are unknown."""
    if within == between == 0:
        return 0.0
    if device.within_node is None or device.between_nodes is None:
        return None
    return max(within / device.within_node, between / device.between_nodes)
