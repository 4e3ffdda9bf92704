"""The stages of a run: what each trains with, and from which step to which.

A run without [[stage]], [[precision.phase]] or a schedule of batch sizes has one.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.fields import batch_schedule, tokens_in
from torchtitan.config.low_precision import Precision
from torchtitan.config.training import Stages
from torchtitan.converters import CONVERTERS
from torchtitan.errors import ConfigError, UserError, nearest
from torchtitan.optim.combined import PAUSED
from torchtitan.optim.schedule import lr_factor

# Sections, or some of their keys, that a stage may change. Others are the run's: sizes, the optimizer, the layout.
CHANGEABLE = {
    "model": "converters rope_theta rope_scaling",
    "training": "dataset dataset_path dataset_mixture text_column train_on chat_template long_conversations packing "
    "document_mask seq_len local_batch_size global_batch_size max_norm z_loss_coefficient mtp_loss_coefficient",
    "optimizer": "lr weight_decay no_weight_decay group ema_decay",
    "moe": "bias_update_speed loss_coefficient z_loss_coefficient",
    **dict.fromkeys(("lr_scheduler", "validation", "evaluation", "activation_checkpoint"), ""),
}
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Stage:
    """A range of steps with a configuration of its own."""

    title: str  # for messages; "" if the run has only this one
    number: int  # counted from 1; all batch sizes of one entry of the file share it
    first_step: int  # a step of the run, counted from 1
    last_step: int
    config: JobConfig  # the configuration of a run that stays in this stage
    # The steps before the learning-rate schedule begins, and its length: the whole run, or this stage if it sets a key
    # of [lr_scheduler].
    schedule: tuple[int, int]
    at_end: bool = False  # whether an entry of [[stage]] ends with it

    def learning_rate(self, step: int) -> float:
        before, steps = self.schedule
        return self.config.optimizer.lr * lr_factor(step - before, steps, self.config.lr_scheduler)

    def with_batch_size(self, size: Any) -> "Stage":
        """This stage with another global batch size, if it is one."""
        changed = self.config.changed(training={"global_batch_size": size})
        return replace(self, config=changed) if isinstance(size, int) else self

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Prefixes the message of a UserError with the title."""
        try:
            yield
        except UserError as error:
            if not self.title:
                raise
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            named = (f"{self.title}: {problem.removeprefix('model.converters: ')}" for problem in problems)
            raise type(error)(*named) from error.__cause__


@dataclass
class Entry:
    """A stage as the file has it."""

    title: str
    until: int | float | str | None
    sections: Sections
    problems: list[str] = field(default_factory=list)
    may_exceed: bool = False  # the end of the run
    ends: str = "until: a step, a fraction of training.steps, or tokens"  # the keys that end it


def parse_stages(config: JobConfig, dp: int = 1) -> list[Stage]:
    """The stages of a run on `dp` data-parallel ranks, in order, or a ConfigError with one sentence per mistake."""
    entries = _entries(config)
    problems = [f"{entry.title}: {problem}" for entry in entries for problem in entry.problems]
    if config.precision.phase and config.stage.entries:
        problems.append("[[stage]] and [[precision.phase]] exclude each other: write the phases as stages.")
    if config.precision.phase and config.model.converters:
        problems.append(
            "model.converters and [[precision.phase]] exclude each other, since each phase has its own converters: "
            "remove model.converters, or the phases."
        )
    if problems:
        raise ConfigError(*problems)
    stages: list[Stage] = []
    step = tokens = 0
    for number, entry in enumerate(entries, 1):
        own = _config_of(entry.sections, config)
        ranges = list(_ranges(own, entry, number == len(entries), step, tokens, dp, problems))
        if problems:  # the ends of those after it would be wrong as well
            raise ConfigError(*problems)
        begin, end = step, ranges[-1][0]
        schedule = (begin, end - begin) if "lr_scheduler" in entry.sections else (0, config.training.steps)
        total = own.lr_scheduler.total_steps
        if total is not None and total < schedule[1]:
            problems.append(
                f"{f'{entry.title}: ' if entry.title else ''}lr_scheduler.total_steps = {total} is fewer than the "
                f"{schedule[1]} steps that are trained with the schedule; raise it, or unset it."
            )
        for last, size, tokens in ranges:  # noqa: B007 (of the next entry)
            at_end = bool(config.stage.entries) and last == end
            if last > step:
                of_size = own.changed(training={"global_batch_size": size})
                stages.append(Stage(entry.title, number, step + 1, last, of_size, schedule, at_end))
            step = last
    sizes = {stage.config.training.global_batch_size for stage in stages}
    if len(sizes) > 1 and config.training.skip_steps:
        problems.append(
            "training.skip_steps counts steps of one size, but training.global_batch_size changes: unset it."
        )
    if len({str(_algorithms(stage.config)) for stage in stages}) > 1:
        problems.append("[[optimizer.group]]: algorithm belongs to the whole run; give each stage the same.")
    if problems:
        raise ConfigError(*problems)
    return _with_averages(stages)


def _with_averages(stages: list[Stage]) -> list[Stage]:
    """If one stage has a moving average of weights, all of them keep what there is of it: also the first, into which
    the checkpoints of any stage are loaded."""
    if all(stage.config.optimizer.ema_decay is None for stage in stages):
        return stages
    paused = {"ema_decay": PAUSED}
    return [
        stage
        if stage.config.optimizer.ema_decay is not None
        else replace(stage, config=stage.config.changed(optimizer=paused))
        for stage in stages
    ]


def _algorithms(config: JobConfig) -> list[tuple[list[str], str]]:
    return [(group.parameters, group.algorithm) for group in config.optimizer.group if group.algorithm]


def first_config(config: JobConfig) -> JobConfig:
    """The configuration of the first stage, for a short run that reaches no other."""
    entries = _phases(config) + _stages(config)
    own = _config_of(entries[0].sections if entries else {}, config)
    return own.changed(training={"global_batch_size": own.training.first_batch_size})


def sizes_without_steps(config: JobConfig, stages: Sequence[Stage]) -> list[str]:
    """A sentence for each size in a schedule of batch sizes that no step of the run has."""
    reached: dict[str, set[int]] = {}
    for number, entry in enumerate(_entries(config), 1):
        given = _config_of(entry.sections, config).training.global_batch_size
        if isinstance(given, str):
            own = (stage.config.training.global_batch_size for stage in stages if stage.number == number)
            reached.setdefault(given, set()).update(size for size in own if isinstance(size, int))
    return [
        f"training.global_batch_size = {given}: no step of this run has batches of {size}, since it ends before they "
        "begin, or begins after they end"
        for given, sizes in reached.items()
        for size, _ in batch_schedule(given)
        if size not in sizes
    ]


def stage_of(step: int, stages: Sequence[Stage]) -> Stage:
    """The stage of a step, from 1; the last one beyond the end of the run."""
    return next((stage for stage in stages if step <= stage.last_step), stages[-1])


def _ranges(
    config: JobConfig, entry: Entry, is_last: bool, step: int, tokens: int, dp: int, problems: list[str]
) -> Iterator[tuple[int, int, int]]:
    """Last step, batch size, and tokens of the run by then, of each range of steps in an entry with one batch size."""
    training, total = config.training, config.training.steps
    given = training.global_batch_size
    sizes = batch_schedule(given) if isinstance(given, str) else ((given, 0),)

    def step_at(end: int | float | str) -> int:
        if isinstance(end, str):
            return step + math.ceil((tokens_in(end) - tokens) / tokens_per_step)
        return round(end * total) if isinstance(end, float) else end

    begin = asked = step
    for place, (size, _) in enumerate(sizes):
        tokens_per_step = replace(training, global_batch_size=size).sequences_per_step(dp) * training.seq_len
        last = max(total, begin + entry.may_exceed) if entry.until is None else step_at(entry.until)
        if place + 1 < len(sizes):
            last = min(last, step_at(sizes[place + 1][1]))
        asked, last = last, max(last, step)  # that size begins before this entry
        tokens += (last - step) * tokens_per_step
        yield last, size, tokens
        step = last
    title = f"{entry.title}: " if entry.title else ""
    if entry.until is None and not is_last:
        problems.append(f"{title}it has no end; set {entry.ends}.")
    elif is_last and entry.until is not None and step < total:
        problems.append(f"{title}the last one ends at step {step} of {total}; remove its end, or add another.")
    elif step > total and not entry.may_exceed:
        problems.append(
            f"{title}it ends at step {step}, after training.steps = {total}; let it end earlier, or raise that."
        )
    elif step <= begin and (entry.title or step == 0):
        before = f"the one before it ends at step {begin}" if begin else "that is before the first one"
        problems.append(
            f"{title}it ends at step {asked} of {total}, but {before}; end it later, since each needs at least "
            "one step."
        )


def _stages(config: JobConfig) -> list[Entry]:
    entries, names = config.stage.entries, [entry.name for entry in config.stage.entries]
    of_converters = {CONVERTERS.get(name).section for name in CONVERTERS.names()}
    result = []
    for place, entry in enumerate(entries):
        problems = [f"the name {entry.name} is another stage's; change it."] if entry.name in names[:place] else []
        for section, keys in entry.sections.items():
            allowed = CHANGEABLE.get(section, None if section not in of_converters else "")
            for key in keys:
                if allowed is None or (allowed and key not in allowed.split()):
                    known = [f"{name}.{other}" for name, others in CHANGEABLE.items() for other in others.split()]
                    problems.append(
                        f"{section}.{key} cannot change within a run{nearest(f'{section}.{key}', known)}; remove it. "
                        "Sizes of the model, the optimizer and degrees of parallelism belong to the whole run."
                    )
        result.append(Entry(f"stage {entry.name}", entry.until, entry.sections, problems))
    return result


def _entries(config: JobConfig) -> list[Entry]:
    return _phases(config) + _stages(config) or [Entry("", None, {})]


def _phases(config: JobConfig) -> list[Entry]:
    """[[precision.phase]], as stages that change only the converters and their sections."""
    result = []
    for number, phase in enumerate(config.precision.phase, 1):
        sections = {CONVERTERS.get(name).section for name in phase.converters if name in CONVERTERS.names()}
        problems = [
            f"the table [precision.phase.{section}] belongs to no converter of this phase; add the converter, or "
            "remove the table."
            for section in phase.sections
            if section not in sections
        ]
        if phase.until is not None and phase.until_step is not None:
            problems.append("until and until_step are both set; keep one of them.")
        until = phase.until_step if phase.until is None else float(phase.until)
        overrides = {"model": {"converters": list(phase.converters)}, **phase.sections}
        ends = "until_step, or until: a fraction of training.steps"
        result.append(Entry(f"[[precision.phase]] {number}", until, overrides, problems, may_exceed=True, ends=ends))
    return result


def _config_of(overrides: Sections, config: JobConfig) -> JobConfig:
    return replace(config.changed(**overrides), precision=Precision(), stage=Stages())


def converters_of(config: JobConfig) -> dict[str, Any]:
    """What determines the converters and their state."""
    sections = {CONVERTERS.get(name).section for name in config.model.converters}
    return {"converters": config.model.converters} | {name: getattr(config, name) for name in sections if name}
