"""The phases of a precision schedule. Used only by runs with [[precision.phase]]."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.config.low_precision import Precision, PrecisionPhase
from torchtitan.converters import (
    CONVERTERS,
    Decision,
    LayerVariants,
    ModelConverter,
    apply_variants,
    layer_variants,
)
from torchtitan.converters.conversion_report import precision_of
from torchtitan.converters.switch import ConvertedModel
from torchtitan.engine.conversion import decisions_of, steps_that_compile
from torchtitan.errors import ConfigError
from torchtitan.protocols import Decoder


@dataclasses.dataclass(frozen=True)
class Phase:
    """A range of steps with its own converters.

    Attributes:
        title: for messages.
        last_step: None for the end of the run.
        config: as for a run that stays in this phase: `model.converters` and their sections are the phase's.
    """

    title: str
    last_step: int | None
    config: JobConfig

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Prefixes the message of a ConfigError with the title."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(
                *(f"{self.title}: {problem.removeprefix('model.converters: ')}" for problem in error.problems)
            ) from None


class PrecisionPhases:
    """The phases of a run, and the current one. `enter` switches an already built model to a phase. `models` are, per
    phase, the full model on the meta device and the converters applied to it."""

    def __init__(self, phases: Sequence[Phase], models: Sequence[ConvertedModel]) -> None:
        self.phases = phases
        self.current = 0
        self.converters_by_phase = [converters for _, converters in models]
        self._variants: list[LayerVariants] = layer_variants(models)

    @property
    def converters(self) -> list[ModelConverter]:
        """The converters of the current phase."""
        return self.converters_by_phase[self.current]

    @property
    def all_converters(self) -> list[ModelConverter]:
        """The converters of all phases."""
        return [converter for converters in self.converters_by_phase for converter in converters]

    @property
    def reports(self) -> list[list[Decision]]:
        """What becomes of each linear layer, per phase."""
        return [decisions_of(converters) for converters in self.converters_by_phase]

    @property
    def schedule(self) -> list[tuple[int | None, str]]:
        """Last step and precision of each phase."""
        return [
            (phase.last_step, precision_of(report)) for phase, report in zip(self.phases, self.reports, strict=True)
        ]

    def steps_to_check(self, first_step: int, compiled: bool) -> set[int]:
        """The first step of each phase, from `first_step` on, that compiles nothing; empty if no phase converts linear
        layers."""
        if not any(converter.decisions for converter in self.all_converters):
            return set()
        steps, first_of_phase = set(), 1
        for phase, converters in zip(self.phases, self.converters_by_phase, strict=True):
            step = max(first_step, first_of_phase) + steps_that_compile(converters, compiled)
            if phase.last_step is None or step <= phase.last_step:
                steps.add(step)
            first_of_phase = (phase.last_step or 0) + 1
        return steps

    def enter(self, step: int, model: nn.Module, compiled: bool) -> bool:
        """Switches the model's layers to the phase of `step`; returns whether the phase changed. Parameters, their
        sharding and the optimizer state stay. Compiled blocks are recompiled."""
        new = phase_of(step, self.phases)
        if new == self.current:
            return False
        apply_variants(model, self._variants[self.current], self._variants[new])
        self.current = new
        if compiled:  # or the previous phase's code would count towards the recompile limit
            torch.compiler.reset()
        return True


def build_precision_phases(
    config: JobConfig, convert: Callable[[JobConfig], tuple[Decoder, list[ModelConverter]]]
) -> tuple[Decoder, PrecisionPhases]:
    """The full model on the meta device in its first phase, and the phases. `convert` builds the model of a
    configuration, and the converters applied to it. Raises a ConfigError if a converter of some phase does not fit the
    model, or cannot switch a built one."""
    phases = parse_phases(config)
    models = []
    for phase in phases:
        with phase.named_in_errors():
            models.append(convert(phase.config))
    return models[0][0], PrecisionPhases(phases, models)


def parse_phases(config: JobConfig) -> list[Phase]:
    """The phases of a run with [[precision.phase]], in order. Raises a ConfigError with one sentence per mistake."""
    entries = config.precision.phase
    problems = []
    if config.model.converters:
        problems.append(
            "model.converters and [[precision.phase]] exclude each other, since each phase has its own converters: "
            "remove model.converters, or the phases."
        )
    phases = []
    before = 0
    for number, entry in enumerate(entries, 1):
        title = f"[[precision.phase]] {number}"
        is_last = number == len(entries)
        last = entry.until_step if entry.until is None else round(entry.until * config.training.steps)
        key = "until" if entry.until_step is None else "until_step"
        if entry.until is not None and entry.until_step is not None:
            problems.append(f"{title}: until and until_step are both set; keep one of them.")
        elif last is None and not is_last:
            problems.append(f"{title}: it has no end; set until_step, or until as a fraction of training.steps.")
        elif last is not None and is_last and last < config.training.steps:
            problems.append(
                f"{title}: the last phase ends at step {last} of {config.training.steps}; remove its {key}, or add "
                "a phase."
            )
        elif last is not None and last <= before:
            problems.append(
                f"{title}: it ends at step {last} of {config.training.steps}, but the phase before it ends at "
                f"step {before}; raise its {key}, since each phase needs at least one step."
            )
        before = last or before
        problems += [f"{title}: {problem}" for problem in _problems(entry, config)]
        phases.append((title, None if is_last else last, entry))
    if problems:
        raise ConfigError(*problems)
    return [Phase(title, last, _config_of(entry, config)) for title, last, entry in phases]


def phase_of(step: int, phases: Sequence[Phase]) -> int:
    """The index of the phase that a step (from 1) belongs to."""
    return next(index for index, phase in enumerate(phases) if phase.last_step is None or step <= phase.last_step)


def _problems(entry: PrecisionPhase, config: JobConfig) -> list[str]:
    """What is wrong with the converters and tables of a phase."""
    known = CONVERTERS.names()
    problems: list[str] = []
    for name in entry.converters:
        if name not in known:
            try:
                CONVERTERS.get(name, "converters")
            except ConfigError as error:
                problems.extend(error.problems)
    if len(set(entry.converters)) < len(entry.converters):
        problems.append("converters: a converter is listed twice; list it once.")
    sections = {CONVERTERS.get(name).section for name in entry.converters if name in known}
    problems += [
        f"the table [precision.phase.{section}] belongs to no converter of this phase; add the converter, or remove "
        "the table."
        for section in entry.sections
        if section not in sections
    ]
    if problems:
        return problems
    own_config = _config_of(entry, config)
    for section in filter(None, sections):
        for key, value in vars(getattr(own_config, section)).items():
            if value is True and key.startswith("enable_fsdp_") and key.endswith("_all_gather"):
                problems.append(
                    f"{section}.{key} changes the class of the weights, which is impossible once the model is built; "
                    "unset it, or remove [[precision.phase]]."
                )
    return problems


def _config_of(entry: PrecisionPhase, config: JobConfig) -> JobConfig:
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in entry.sections.items()}
    model = dataclasses.replace(config.model, converters=list(entry.converters))
    return dataclasses.replace(config, model=model, precision=Precision(), **sections)
