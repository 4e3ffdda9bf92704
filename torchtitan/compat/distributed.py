"""Process groups, functional collectives, symmetric memory.

- `distributed_c10d._get_default_store`: the run's store, used by heartbeats and the watchdog
- `distributed_c10d._set_pg_timeout`, `_world.pg_map`: change the timeout of existing groups
- `distributed_c10d._resolve_process_group`: lets a plan find the ranks of a collective by its group's name
- `_C._distributed_c10d._dump_fr_trace`: the flight recorder's last collectives under gloo; missing from the type stubs
- `fsdp._fully_shard._fsdp_collectives`: `DefaultReduceScatter`, which allocates, and `foreach_reduce`, which with one
  rank allocates an input and an output and copies one to the other (seen in 2.13)
- `fsdp._fully_shard._fsdp_param_group.FSDPParamGroup`: its two methods that wait for collectives are timed on CUDA;
  with one rank it gathers a cast copy of each weight, and copies that again (seen in 2.13);
  `FSDPModule._get_fsdp_state` leads to the groups
- `fsdp._fully_shard._fsdp_param.FSDPParam`: a weight of a group, whose `all_gather_inputs` casts
- `_functional_collectives`: collectives visible to the compiler; 2.13 renamed two, and warns about the old names
- `checkpoint.filesystem._StorageInfo`, `checkpoint.metadata._MEM_FORMAT_ENCODING`: parts of a checkpoint's metadata
- `checkpoint.staging.DefaultStager`, its `_state_dict_stager`: whether it is closed
- `_symmetric_memory.enable_symm_mem_for_group`: asynchronous tensor parallelism; CUDA only
- `ops.symm_mem.fused_all_gather_matmul`: the same, for a GEMM that sums over the gathered dimension
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.distributed_c10d import (
    _get_default_store as default_store,
)
from torch.distributed.distributed_c10d import (
    _resolve_process_group,
    _set_pg_timeout,
    _world,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torchtitan.hardware import ranks_may_share_gpus
from torchtitan.logging import logger

__all__ = [
    "DefaultReduceScatter",
    "FSDPParam",
    "FSDPParamGroup",
    "MemoryFormatEncoding",
    "StorageInfo",
    "all_gather_of_one_rank_copies_twice",
    "all_gather_tensor",
    "default_store",
    "enable_symmetric_memory",
    "flight_recorder_trace",
    "fsdp_parameters",
    "functional_collectives",
    "fused_all_gather_matmul_over_tokens",
    "is_closed",
    "process_groups",
    "ranks_of_group",
    "reduce_scatter_of_one_rank_copies",
    "reduce_scatter_tensor",
    "set_group_timeout",
]

all_gather_tensor: Callable[..., torch.Tensor] = (
    getattr(functional_collectives, "all_gather_single", None) or functional_collectives.all_gather_tensor
)
reduce_scatter_tensor: Callable[..., torch.Tensor] = (
    getattr(functional_collectives, "reduce_scatter_single", None) or functional_collectives.reduce_scatter_tensor
)


@functools.cache
def reduce_scatter_of_one_rank_copies() -> bool:
    """Whether FSDP with one rank allocates the input of a reduce-scatter, then its output, and copies."""
    source = inspect.getsource(foreach_reduce)
    known = source.count(".allocate(") == 2 and "reduce_output.copy_(reduce_scatter_input)" in source
    if not known:
        logger.debug("FSDP of this torch reduces gradients of one rank in another way; they may be copied once more")
    return known


@functools.cache
def all_gather_of_one_rank_copies_twice() -> bool:
    """Whether FSDP with one rank casts a weight into a new tensor (`FSDPParam.all_gather_inputs`), makes the gathered
    weight with that tensor's size and dtype if there is none yet (`init_all_gather_outputs`), and copies."""
    gather = inspect.getsource(FSDPParamGroup.wait_for_unshard)
    known = (
        gather.count("fsdp_param.all_gather_inputs[0]") == 1
        and "[all_gather_input.dtype]" in gather
        and "tensor.copy_(all_gather_input)" in gather
        and "[_to_dtype_if_needed(sharded_param_data, self.param_dtype)]" in inspect.getsource(FSDPParam)
    )
    if not known:
        logger.debug("FSDP of this torch gathers weights of one rank in another way; they may be copied once more")
    return known


def fsdp_parameters(module: FSDPModule) -> list[FSDPParam]:
    """The weights that this module gathers, not those of modules inside."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this process is in."""
    return list(_world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    _set_pg_timeout(timeout, group)


def ranks_of_group(name: str) -> list[int]:
    """Global ranks of the group with this name."""
    return dist.get_process_group_ranks(_resolve_process_group(name))  # type: ignore[arg-type]


def flight_recorder_trace() -> bytes:
    """The last collectives of this process, pickled."""
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    trace: bytes = _dump_fr_trace()
    return trace


def enable_symmetric_memory(group_name: str) -> None:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if ranks_may_share_gpus():
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]


def fused_all_gather_matmul_over_tokens(
    shard: torch.Tensor, others: Sequence[torch.Tensor], group_name: str
) -> list[torch.Tensor]:
    """all_gather(shard).T @ other, of (tokens of this rank, C) and each (tokens, D); on CUDA, with symmetric memory."""
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    _, products = fused(shard.t(), list(others), 1, group_name, return_A=False)
    return list(products)


def is_closed(stager: DefaultStager) -> bool:
    """Whether it cannot copy again: in torch 2.11 it closes itself after each checkpoint."""
    return not stager._state_dict_stager._deepcopy_dispatch
