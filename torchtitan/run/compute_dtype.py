"""The compute dtype of a run with `training.mixed_precision_param = "auto"`."""

import dataclasses
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan.checkpoint.folder import run_steps
from torchtitan.config import JobConfig
from torchtitan.config.manager import read_toml
from torchtitan.errors import ConfigError
from torchtitan.files import joined
from torchtitan.kernels.cpu_speed import bfloat16_is_fast

ComputeDtype = Literal["bfloat16", "float32"]


def decide_compute_dtype(config: JobConfig, device_type: str) -> JobConfig:
    """`config` with "auto" replaced by "bfloat16", or by "float32" on a CPU whose float32 GEMMs are faster. A resumed
    run keeps its dtype. All ranks get the same answer; within a process group this is collective."""
    if config.training.mixed_precision_param != "auto":
        return config
    dtype: ComputeDtype = "bfloat16"
    if device_type == "cpu":
        dtype = _agree_over_ranks(_dtype_of_checkpoint(config), bfloat16_is_fast())
    return dataclasses.replace(config, training=dataclasses.replace(config.training, mixed_precision_param=dtype))


def _dtype_of_checkpoint(config: JobConfig) -> ComputeDtype | None:
    """The dtype of the run in this dump folder, if it has a checkpoint to resume from."""
    folder = Path(config.job.dump_folder)
    if not config.checkpoint.enable_checkpoint or not run_steps(joined(folder, config.checkpoint.folder)):
        return None
    try:
        dtype = read_toml(str(folder / "config.toml")).get("training", {}).get("mixed_precision_param")
    except ConfigError:  # missing or truncated
        return None
    return dtype if dtype in ("bfloat16", "float32") else None


def _agree_over_ranks(of_checkpoint: ComputeDtype | None, bfloat16: bool) -> ComputeDtype:
    if dist.is_initialized() and dist.get_world_size() > 1:
        fast = torch.tensor(int(bfloat16))
        dist.all_reduce(fast, op=dist.ReduceOp.MIN)
        said = [of_checkpoint]
        dist.broadcast_object_list(said)
        of_checkpoint, bfloat16 = said[0], bool(fast)
    return of_checkpoint or ("bfloat16" if bfloat16 else "float32")
