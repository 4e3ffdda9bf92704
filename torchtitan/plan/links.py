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
        "dp_replicate": (dims.dp_replicate, within),
        "pp": (dims.pp, within * dims.dp_replicate),
        "stage": (within * dims.dp_replicate, 1),
    }.get(dimension, (dims.pp * dims.dp * dims.cp * dims.tp, 1))


def min_seconds(kind: str, size: float, ranks: int, stride: int, device: PlannedDevice) -> float | None:
    """A lower bound for the time of collectives of `size` bytes in total: no byte crosses a link more often than
    needed.

    In an all-gather a rank receives everything except its own shard, and a machine everything except its ranks' shards,
    over the network links of those ranks. A reduce-scatter is the reverse; an all-reduce is both.
    """
    if ranks == 1:
        return 0.0
    if device.within_node is None or device.between_nodes is None:
        return None
    here = max(1, min(ranks, NODE // stride))
    if kind in ("send", "receive"):
        return size / (device.within_node if here == ranks else device.between_nodes)
    passes = 2 if kind == "all-reduce" else 1
    if kind == "all-to-all":
        within, between = size * (here - 1) / ranks, size * (ranks - here) / ranks
    else:
        within = size * (ranks - 1) / ranks if here > 1 else 0
        between = size * (ranks - here) / ranks / here
    return passes * max(within / device.within_node, between / device.between_nodes)
