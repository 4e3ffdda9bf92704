"""What `python -m torchtitan.explain` prints: the layers that a run would convert to low precision, and why."""

from pathlib import Path

from torchtitan.config import JobConfig
from torchtitan.converters import Decision
from torchtitan.converters.conversion_report import phases_to_json, summary, to_json, to_table
from torchtitan.engine.conversion import build_converted_model, conversion_target, decisions_of
from torchtitan.engine.model_args import find_model_args, register_models
from torchtitan.engine.stages import parse_stages
from torchtitan.errors import ConfigError
from torchtitan.models import MODELS


def explain(config: JobConfig, file: Path | None) -> None:
    """Prints the report on each stage, and writes all as JSON to `file`."""
    register_models(config)
    reports = []
    stages = parse_stages(config)
    for stage in stages:
        with stage.named_in_errors():
            report = explain_conversion(stage.config)
        reports.append((None if stage is stages[-1] else stage.last_step, report))
        if stage.title:
            print(f"{stage.title}, to step {stage.last_step}")
        print(f"{to_table(report)}\n{summary(report)}" if report else "no converters")
    if file:
        text = to_json(reports[0][1]) if len(reports) == 1 else phases_to_json(reports)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {file} cannot be written ({error.strerror}).") from None


def explain_conversion(config: JobConfig) -> list[Decision]:
    """One decision per linear layer of the configured model, as in `conversion.json`, without training. Raises the
    ConfigErrors of a training run, also if no layer is converted."""
    target = conversion_target(config, MODELS.get(config.model.name), device=None)
    _, converters = build_converted_model(config, find_model_args(config.model), target)
    return decisions_of(converters)
