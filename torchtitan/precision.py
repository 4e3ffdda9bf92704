"""The phases of a run's precision schedule. A run without one is a single phase."""

import contextlib
import dataclasses
from collections.abc import Iterator

from torchtitan.config import JobConfig
from torchtitan.config.low_precision import Precision, PrecisionPhase
from torchtitan.converters import CONVERTERS
from torchtitan.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of a run with its own converters.

    Attributes:
        title: for messages; "" for a run without a schedule.
        last: its last step; None for the end of the run.
        config: the run's, as if all of it were like this: its `model.converters` and their sections are the phase's.
    """

    title: str
    last: int | None
    config: JobConfig

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Around what may be a mistake in this phase: the message then begins with its title."""
        try:
            yield
        except ConfigError as error:
            if not self.title:
                raise
            raise ConfigError(
                *(f"{self.title}: {problem.removeprefix('model.converters: ')}" for problem in error.problems)
            ) from None


def phases_of(config: JobConfig) -> list[Phase]:
    """The phases of a run, in order.

    Raises:
        ConfigError: with a sentence for each mistake in the schedule.
    """
    entries = config.precision.phase
    if not entries:
        return [Phase("", None, config)]
    problems = []
    if config.model.converters:
        problems.append(
            "model.converters and [[precision.phase]] both say which converters run; keep one of them, for a phase "
            "names its own."
        )
    phases = []
    before = 0
    for number, entry in enumerate(entries, 1):
        title = f"[[precision.phase]] {number}"
        is_last = number == len(entries)
        last = _last_step(entry, config.training.steps)
        key = "until" if entry.until_step is None else "until_step"
        if entry.until is not None and entry.until_step is not None:
            problems.append(f"{title}: until and until_step both say when it ends; keep one of them.")
        elif last is None and not is_last:
            problems.append(f"{title}: say when it ends: until_step, or until as a share of training.steps.")
        elif last is not None and is_last and last < config.training.steps:
            problems.append(
                f"{title}: it is the last and ends at step {last} of {config.training.steps}; leave out its "
                f"{key}, or add a phase."
            )
        elif last is not None and last <= before:
            problems.append(
                f"{title}: it would end at step {last} of {config.training.steps}, and the phase before ends at step "
                f"{before}; each needs a step at least: make its {key} larger."
            )
        before = last or before
        problems += [f"{title}: {problem}" for problem in _problems(entry, config)]
        phases.append((title, None if is_last else last, entry))
    if problems:
        raise ConfigError(*problems)
    return [Phase(title, last, _config_of(entry, config)) for title, last, entry in phases]


def phase_of(step: int, phases: list[Phase]) -> int:
    """The index of the phase that a step (from 1) belongs to."""
    return next(index for index, phase in enumerate(phases) if phase.last is None or step <= phase.last)


def _last_step(entry: PrecisionPhase, steps: int) -> int | None:
    return entry.until_step if entry.until is None else round(entry.until * steps)


def _problems(entry: PrecisionPhase, config: JobConfig) -> list[str]:
    """What is wrong with the converters of a phase and their tables."""
    known = CONVERTERS.names()
    problems: list[str] = []
    for name in entry.converters:
        if name not in known:
            try:
                CONVERTERS.get(name, "converters")
            except ConfigError as error:
                problems.extend(error.problems)
    if len(set(entry.converters)) < len(entry.converters):
        problems.append("converters: a converter is named twice; each can be applied once.")
    sections = {CONVERTERS.get(name).section for name in entry.converters if name in known}
    problems += [
        f"the table [precision.phase.{section}] is of no converter of the phase; add the converter, or remove it."
        for section in entry.sections
        if section not in sections
    ]
    if problems:
        return problems
    mine = _config_of(entry, config)
    for section in filter(None, sections):
        for key, value in vars(getattr(mine, section)).items():
            if value is True and key.startswith("enable_fsdp_") and key.endswith("_all_gather"):
                problems.append(
                    f"{section}.{key} keeps the weights in a form that a built model cannot leave or take on; unset "
                    "it, or do without [[precision.phase]]."
                )
    return problems


def _config_of(entry: PrecisionPhase, config: JobConfig) -> JobConfig:
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in entry.sections.items()}
    model = dataclasses.replace(config.model, converters=list(entry.converters))
    return dataclasses.replace(config, model=model, precision=Precision(), **sections)
