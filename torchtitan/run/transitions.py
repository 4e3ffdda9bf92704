"""From one stage of a run to the next."""

import gc

import torch

from torchtitan.engine.converter_hooks import converter_state, load_converter_state
from torchtitan.engine.stages import Stage, converters_of, stage_of
from torchtitan.logging import logger
from torchtitan.parallel.process_group import set_timeout
from torchtitan.run.trainer import Trainer


def enter_next_stage(run: Trainer) -> None:
    """Goes on with the data, the model and the converters of the next stage."""
    before, former, loader, scale = run.stage, run.config, run.loader, run.engine.loss_scale
    positions, of_converters = run.positions(), converter_state(run.engine)
    build_parts(run, stage_of(run.step + 1, run.stages))
    run.loader.go_on_from(loader, positions)
    if converters_of(former) == converters_of(run.config):  # otherwise their state begins again
        load_converter_state(run.engine, of_converters, scale)
    run.checkpoints.begin_average(run.step)
    title = f"batch size {run.global_batch_size}" if run.stage.number == before.number else run.stage.title
    logger.info(f"after step {run.step}: {title} begins")


def build_parts(run: Trainer, stage: Stage) -> None:
    """Builds what a stage trains with in place of what is there; weights and optimizer state stay."""
    run.checkpoints.wait()
    tensors = run.checkpoints.take_state()
    run.loader.close()
    run.hooks.own.clear()
    del run.engine  # its memory is needed
    gc.collect()
    torch.compiler.reset()  # otherwise the code of the stage before would count towards the recompile limit
    run.stage = stage
    run.engine, run.loader, reports = run.builder.build(stage)
    run.hooks.own.extend(reports)
    run.checkpoints.hand_on(tensors, run.engine.model, run.engine.optimizer, run.config.training.seq_len)
    set_timeout(run.config.comm.init_timeout_seconds)
