"""The compute dtype of a run with `training.mixed_precision_param = "auto"`."""

from pathlib import Path
from typing import Literal

import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.config.manager import read_toml
from torchtitan.errors import ConfigError
from torchtitan.files import joined
from torchtitan.kernels.cpu_speed import bfloat16_is_fast
from torchtitan.parallel.object_collectives import all_gather_object, from_rank_0
from torchtitan.registry import load

ComputeDtype = Literal["bfloat16", "float32"]


def decide_compute_dtype(config: JobConfig, device_type: str) -> JobConfig:
    """`config` with "auto" replaced by "bfloat16", or by "float32" on a CPU whose float32 GEMMs are faster. A resumed
    run keeps its dtype. All ranks get the same answer; within a process group this is collective."""
    if config.training.mixed_precision_param != "auto":
        return config
    dtype: ComputeDtype = "bfloat16"
    if device_type == "cpu":
        of_checkpoint, is_fast = _dtype_of_checkpoint(config), bfloat16_is_fast()
        if dist.is_initialized():
            of_checkpoint, is_fast = from_rank_0(lambda: of_checkpoint), all(all_gather_object(is_fast))
        dtype = of_checkpoint or ("bfloat16" if is_fast else "float32")
    return config.changed(training={"mixed_precision_param": dtype})


def _dtype_of_checkpoint(config: JobConfig) -> ComputeDtype | None:
    """The dtype of the run in this dump folder, if it has a checkpoint to resume from."""
    folder = Path(config.job.dump_folder)
    if not config.checkpoint.enable_checkpoint:
        return None
    if not load("torchtitan.checkpoint.folder:run_steps")(joined(folder, config.checkpoint.folder)):
        return None
    try:
        dtype = read_toml(str(folder / "config.toml")).get("training", {}).get("mixed_precision_param")
    except ConfigError:  # missing or truncated
        return None
    return dtype if dtype in ("bfloat16", "float32") else None
