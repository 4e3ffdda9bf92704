"""What becomes of each linear layer: a run with converters logs it, and `tools.explain` prints it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.converters import Decision
from torchtitan.converters.conversion_report import phases_to_json, summary, to_json, to_table
from torchtitan.device import BUSY, CoreMeter
from torchtitan.engine.conversion import build_converted_model, conversion_target, decisions_of
from torchtitan.engine.engine import Engine
from torchtitan.engine.model_args import find_model_args, register_models
from torchtitan.engine.stages import Stage, parse_stages
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.registry import deferred

_slowness: Callable[..., list[float]] = deferred("torchtitan.converters.measured_filter:slowness")
_cpu_kernel: Callable[[str], str] = deferred("torchtitan.kernels.cpu_gemm:cpu_kernel")

SLOW = 4  # times the time of a bf16 layer; slower than this is too slow even for experiments


def log_conversion(stages: Sequence[Stage], reports: Sequence[Sequence[Decision]]) -> tuple[str, str]:
    """Logs the precision of each linear layer, by stage, and the rule that decided it. Returns them as JSON and as a
    table for each stage, or twice ""."""
    tables, numbers = [], set[int]()
    for stage, report in zip(stages, reports, strict=True):
        if report and stage.number not in numbers:  # one for all batch sizes
            numbers.add(stage.number)
            tables.append(f"{stage.title or 'conversion to low precision'}:\n{to_table(report)}")
            logger.info(tables[-1])
            logger.info(summary(report))
    return (_as_json(stages, reports), "\n\n".join(tables)) if tables else ("", "")


def _as_json(stages: Sequence[Stage], reports: Sequence[Sequence[Decision]]) -> str:
    ends = [None if stage is stages[-1] else stage.last_step for stage in stages]
    return to_json(reports[0]) if len(stages) == 1 else phases_to_json(list(zip(ends, reports, strict=True)))


def log_cost_of_low_precision(engine: Engine) -> None:
    """Logs how much slower converted layers are on a CPU, measured before the first step."""
    if engine.device.type != "cpu" or dist.get_rank() > 0:
        return
    dtype = engine.config.training.mixed_precision_param
    for converter in engine.converters:
        meter = CoreMeter()
        ratios = _slowness(converter, getattr(torch, dtype)) if converter.decisions else []
        if not ratios or converter.gemms is None:
            continue
        busy = meter.threads_waiting() > BUSY
        slower = f"{min(ratios):.1f} to {max(ratios):.1f} times as long as in {dtype}"
        line = f"{converter.name} {converter.decisions[0].recipe}: its layers take {slower} on this CPU"
        if busy:
            logger.info(f"{line}, as measured beside other processes; on a quiet machine this may differ")
        elif max(ratios) > SLOW:
            logger.warning(f"{line}; use {converter.name} on a GPU, or expect steps to take that much longer")
        else:
            logger.info(f"{line}{_cpu_kernel(converter.gemms.op.operation)}")


def explain(config: JobConfig, file: Path | None) -> None:
    """Prints the report on each stage, and writes all as JSON to `file`."""
    register_models(config)
    reports = []
    stages = parse_stages(config)
    for stage in stages:
        with stage.named_in_errors():
            report = explain_conversion(stage.config)
        reports.append(report)
        if stage.title:
            print(f"{stage.title}, to step {stage.last_step}")
        print(f"{to_table(report)}\n{summary(report)}" if report else "no converters")
    if file:
        try:
            file.write_text(_as_json(stages, reports), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {file} cannot be written ({error.strerror}).") from None


def explain_conversion(config: JobConfig) -> list[Decision]:
    """One decision per linear layer of the configured model, as in `conversion.json`, without training. Raises the
    ConfigErrors of a training run, also if no layer is converted."""
    target = conversion_target(config, MODELS.get(config.model.name), device=None)
    _, converters = build_converted_model(config, find_model_args(config.model), target)
    return decisions_of(converters)
