"""The process group: started with patience, then held to a shorter timeout."""

import os
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from torchtitan.config.system import Comm
from torchtitan.device import Device


def world_from_environment() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) as torchrun sets them; (0, 0, 1) without torchrun."""
    rank, local_rank, world_size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    return rank, local_rank, world_size


def init_process_group(device: Device, comm: Comm) -> None:
    """The default group. Without torchrun it is a group of this process alone."""
    if device.type == "cuda" and comm.trace_buf_size:  # NCCL's record of late collectives, dumped after a timeout
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(device.backend, timeout=timeout)
    else:
        dist.init_process_group(device.backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def set_timeout(seconds: int, groups: Iterable[dist.ProcessGroup]) -> None:
    """From now on a collective of these groups fails after `seconds`. Call it on all ranks at the same place."""
    dist.barrier()  # nobody is held to the shorter time while others still start up
    for group in groups:
        _set_pg_timeout(timedelta(seconds=seconds), group)
