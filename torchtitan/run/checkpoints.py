"""Builds what saves and loads the checkpoints of a run."""

import dataclasses
import functools
from typing import Any

import torch.distributed as dist

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.tokenizer import identity_of
from torchtitan.checkpoint.tokenizer_copy import COPY
from torchtitan.config import JobConfig
from torchtitan.data import Tokenizer
from torchtitan.engine.engine import Engine
from torchtitan.engine.model_args import describe_parametrization, rope_keys
from torchtitan.errors import public
from torchtitan.models import MODELS
from torchtitan.parallel.object_collectives import raise_on_all_ranks
from torchtitan.registry import load
from torchtitan.run.run_folder import RunFolder


def build_manager(engine: Engine, tokenizer: Tokenizer, folder: RunFolder, config: JobConfig) -> CheckpointManager:
    training, args = config.training, engine.model.args
    boundaries: dict[str, Any] = {"add_bos": training.add_bos, "add_eos": training.add_eos}
    if config.checkpoint.enable_checkpoint and config.checkpoint.last_save_in_hf:  # otherwise it would fail at the end
        tokenizer_files = load("torchtitan.tools.interchange.tokenizer_files:tokenizer_files")
        write = functools.partial(tokenizer_files, config.model.tokenizer_path, **boundaries)
        raise_on_all_ranks(write if dist.get_rank() == 0 else lambda: None)
    exchange = None
    if config.checkpoint.initial_load_path or config.checkpoint.last_save_in_hf:
        spec, copy = MODELS.get(config.model.name), str(folder.path / COPY)
        published = load("torchtitan.tools.interchange.model:published")
        exchange = load("torchtitan.tools.interchange.exchange:Exchange")(
            published(spec, args, copy, training.seq_len, **boundaries, changed=rope_keys(config.model)),
            None if "tokenizer" in config.checkpoint.exclude_from_loading else tokenizer,
        )
    return CheckpointManager(
        config.checkpoint,
        folder.path,
        engine.model,
        engine.optimizer,
        # Not only sizes: the moments of an optimizer are as large as the gradients of its parametrization.
        identity={**dataclasses.asdict(args), "parametrization": describe_parametrization(config.model)},
        about={
            "layout": {"processes": dist.get_world_size(), **dataclasses.asdict(engine.meshes.dims)},
            "configuration": public(dataclasses.asdict(config)),
        },
        exchange=exchange,
        tokenizer=identity_of(tokenizer),
        on_saved=lambda step: folder.record_event(step, "checkpoint"),
        last_step=training.steps,
        save_timeout_seconds=config.comm.save_timeout_seconds,
    )
