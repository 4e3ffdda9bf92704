"""Short runs within scripts, which leave nothing behind."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator

from torchtitan.checks.config_checks import check_run
from torchtitan.config import JobConfig
from torchtitan.config.output import Checkpoint
from torchtitan.device import find_device
from torchtitan.engine.stages import first_config
from torchtitan.logging import Waiting
from torchtitan.run.build_trainer import build_trainer
from torchtitan.run.trainer import Trainer
from torchtitan.world import world


@contextlib.contextmanager
def temporary_trainer(config: JobConfig) -> Iterator[Trainer]:
    """A trainer, whose dump folder is deleted afterwards. It starts at step 0 and saves no checkpoints:
    `checkpoint.folder` may belong to a real run. Weights of `checkpoint.initial_load_path` are loaded. Of a run with
    stages it trains the first. Nothing goes to trackers."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(initial_load_path=config.checkpoint.initial_load_path)
        config = dataclasses.replace(first_config(config), checkpoint=checkpoint).changed(
            job={"dump_folder": folder}, metrics={"trackers": []}
        )
        device = find_device(world().local_rank)
        dims, stages = check_run(config, world().size, device.type)
        with (
            build_trainer(config, dims, stages, device) as trainer,
            Waiting("short run", config.training.steps, "steps", lambda: trainer.step),
        ):
            yield trainer
