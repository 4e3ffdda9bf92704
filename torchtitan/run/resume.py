"""What a run saves beside tensors, and how it continues from that."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torchtitan.checkpoint.train_state import TrainState, check_kind, refuse_wrong_values
from torchtitan.config.compare import differing, display, flat
from torchtitan.converters.conversion_report import schedule_line
from torchtitan.data.loader import with_named_fields
from torchtitan.engine.converter_hooks import converter_state, load_converter_state
from torchtitan.engine.stages import stage_of
from torchtitan.errors import CheckpointError, public
from torchtitan.logging import logger
from torchtitan.protocols import Hook
from torchtitan.run.hooks import naming_hook
from torchtitan.run.trainer import Trainer
from torchtitan.run.transitions import build_parts, enter_next_stage


def state_of(run: Trainer) -> TrainState:
    """Complete on rank 0, except for what the checkpoint manager adds."""
    run.hooks.call(run, "before_save")
    begun = [stage for stage in run.stages if stage.first_step <= max(run.step, 1)]
    return TrainState(
        step=run.step,
        first_step=run.first_step,
        tokens_seen=run.tokens_seen,
        guard=run.guard.state_dict(),
        dataloader=run.positions(),
        stages=run.schedule if len(run.stages) > 1 else None,
        seq_len=max(stage.config.training.seq_len for stage in begun),
        learning_rate=run.next_learning_rate if run.step < run.config.training.steps else None,
        converters=converter_state(run.engine),
        hooks=run.hooks.states(),
        loss_scale=run.engine.loss_scale,
    )


def resume(run: Trainer, state: TrainState) -> None:
    """Continues from a checkpoint whose weights are loaded."""
    run.step, run.tokens_seen = state.step, state.tokens_seen
    continues_another = run.checkpoints.step_on_disk is None
    run.first_step = run.step if continues_another else state.first_step
    former = flat(run.checkpoints.former_configuration)
    current = flat(public(json.loads(json.dumps(dataclasses.asdict(run.folder.config), default=str))))
    for key in differing([former, current]):
        if key in former and key in current:  # otherwise of another version
            old, new = run.folder.changed[key] = [display(former[key]), display(current[key])]
            logger.info(f"{key} = {new}; it was {old} when the checkpoint was saved")
    with refuse_wrong_values():
        rows, saved = run.builder.data.rows, len((state.dataloader or {}).get("positions", ()))
    if more_rows := saved > rows and saved % rows == 0:  # for batch sizes that this run does not reach
        run.builder = run.builder.with_rows(saved)
    if (stage := stage_of(run.step, run.stages)) is not run.stage or more_rows:
        build_parts(run, stage)
    with refuse_wrong_values():
        if state.learning_rate is not None:
            _compare_learning_rate(run, state.learning_rate)
        _compare_stages(run, [(last, str(title)) for last, title in state.stages or ()])
        if state.guard is not None:
            run.guard.load_state_dict(state.guard)
        if state.dataloader is not None:
            _load_positions(run, state.dataloader, state.stages or ())
        scale = run.engine.loss_scale if state.loss_scale is None else state.loss_scale
        load_converter_state(run.engine, state.converters or {}, scale)
        run.hooks.former = state.hooks or {}
    load_states(run.hooks.users, run.hooks.former)
    if run.step < run.config.training.steps and stage_of(run.step + 1, run.stages) is not run.stage:
        enter_next_stage(run)
    else:
        run.checkpoints.begin_average(run.step)
    if (lost := sorted(run.hooks.former.keys() - run.hooks.users.keys())) and dist.get_rank() == 0:
        logger.warning(f"hooks of the checkpoint that this run lacks: {', '.join(lost)}; it keeps their state")


def _load_positions(run: Trainer, state: Mapping[str, Any], saved: Sequence[tuple[int, str]]) -> None:
    """Continues where the checkpoint was in the data. If stages of the file have moved since, that may be the data
    of another one than its step has now, or of another batch size: that one is built first, and then left."""
    check_kind(state, {"positions": {}}, "dataloader")
    state = with_named_fields(state)
    check_kind(state, {"positions": run.loader.state_dict()["positions"]}, "dataloader")
    try:
        return run.loader.load_state_dict(state)
    except CheckpointError as error:
        if not saved and len(run.stages) == 1:
            raise
        others = [stage.with_batch_size(state.get("global_batch_size")) for stage in run.stages]
        fitting = next((stage for stage in others if run.builder.reads_as(stage.config, state)), None)
        if fitting is None:
            of_checkpoint = next((title for last, title in saved if run.step <= last), "") or "a run without stages"
            raise CheckpointError(
                f"{error} It was saved in {of_checkpoint}: a file that goes on from there still has that part."
            ) from None
    build_parts(run, fitting)
    run.loader.load_state_dict(state)


def _compare_learning_rate(run: Trainer, saved: float) -> None:
    """With the learning rate that the checkpoint's run would have used next."""
    step, ours = run.step + 1, run.next_learning_rate
    if not math.isclose(saved, ours, rel_tol=1e-5) and dist.get_rank() == 0:
        logger.warning(
            f"the learning rate of step {step} is {ours:.6g}; it would have been {saved:.6g} in the run of the "
            "checkpoint. To keep its schedule, compare optimizer.lr, training.steps and [lr_scheduler]"
        )


def _compare_stages(run: Trainer, saved: Sequence[tuple[int, str]]) -> None:
    """With the stages of the checkpoint's run."""
    ours = run.schedule if len(run.stages) > 1 else []
    if saved and saved != ours and dist.get_rank() == 0:
        logger.warning(
            f"the checkpoint of step {run.step} is of a run with {schedule_line(saved)}; this run goes on with "
            f"{schedule_line(ours) if ours else 'no stages'} (fractions such as until = 0.9 refer to "
            "training.steps)"
        )


def load_states(hooks: Mapping[str, Hook], states: Mapping[str, Any]) -> None:
    """Loads `Hooks.states`. Raises a CheckpointError if they are invalid."""
    for name in hooks.keys() & states.keys():
        with refuse_wrong_values():
            check_kind(states[name], {"lr_factor": 1.0, "state": {}}, f"hooks.{name}")
            hooks[name].lr_factor, state = states[name]["lr_factor"], states[name]["state"]
        with naming_hook(name, "load_state_dict"):
            hooks[name].load_state_dict(state)
