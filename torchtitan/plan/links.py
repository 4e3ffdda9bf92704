"""Lower bounds for the time of collectives, from link bandwidths."""

from torchtitan.parallel.dims import ParallelDims
from torchtitan.plan.devices import PlannedDevice

NODE = 8  # devices in a machine


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
    }.get(dimension, (dims.pp * dims.dp * dims.cp * dims.tp, 1))


def link_bytes(kind: str, size: float, ranks: int, stride: int) -> tuple[float, float]:
    """What collectives of `size` bytes in total must move in one direction over a rank's links within its machine, and
    over its part of the machine's network.

    In an all-gather a rank receives everything except its own shard, and a machine everything except its ranks' shards,
    over the network links of those ranks. A reduce-scatter is the reverse; an all-reduce is both.
    """
    here = max(1, min(ranks, NODE // stride))
    if kind in ("send", "receive"):
        return (size, 0.0) if here == ranks else (0.0, size)
    if kind == "all-to-all":
        return size * (here - 1) / ranks, size * (ranks - here) / ranks
    passes = 2 if kind == "all-reduce" else 1
    within = size * (ranks - 1) / ranks if here > 1 else 0.0
    return passes * within, passes * size * (ranks - here) / ranks / here


def min_seconds(within: float, between: float, device: PlannedDevice) -> float | None:
    """A lower bound for the time of moving these bytes, of `link_bytes`; None if bandwidths are unknown."""
    if within == between == 0:
        return 0.0
    if device.within_node is None or device.between_nodes is None:
        return None
    return max(within / device.within_node, between / device.between_nodes)
