"""Finds which layers can train in which low precision within a loss budget, and writes that as configuration.

python scripts/search_precision.py CONFIG.toml --budget 0.5% [--steps 100] [--seeds 3] [--device H100]
    [--output precision_search] [--section.key=value ...]

1. One short run in bf16, and others with other initial weights, whose losses differ by their spread. At the last step
   of the first, it computes each linear layer's three GEMMs in each recipe that runs on this device.
2. For each converter that pays off, a short run with its fastest recipe in all layers, and the same seed and data. The
   loss that it costs is the scale of the model of losses (docs/low_precision.md).
3. The assignment of recipes to layers whose modelled time on --device is least within the budget, which is a percentage
   of the loss. A short run with it measures what it costs.

Writes OUTPUT.toml (keys to merge into the configuration), OUTPUT.png (a map of layers and recipes) and OUTPUT.json (all
numbers) when all runs are done. Ctrl-C ends it at once and writes nothing. Runs in one process; model.converters and
default filters of CONFIG.toml are replaced.
"""

import argparse
import dataclasses
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.errors import INTERRUPTED, ConfigError, run_command
from torchtitan.files import local_path
from torchtitan.plan.step_model import DATA_SHEET_RATES, RATES
from torchtitan.strict_json import finite

DEVICES = {**RATES, **DATA_SHEET_RATES}
LAST = 20  # a run's loss is the mean of this many steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", type=local_path, help="TOML file of the run")
    parser.add_argument("--budget", required=True, help="loss that low precision may cost, such as 0.5%%")
    parser.add_argument("--steps", type=int, default=100, help="of each short run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of bf16 runs, for the spread (default: %(default)s)")
    parser.add_argument("--device", choices=DEVICES, default="H100", help="to model the time of (default: %(default)s)")
    parser.add_argument(
        "--gemms-only",
        action="store_true",
        help="leave the time of rounding out of the model, for a small model that stands for a large one",
    )
    parser.add_argument(
        "--output", type=local_path, default=Path("precision_search"), help="without .toml, .png, .json"
    )
    arguments, flags = parser.parse_known_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            tempfile.tempdir = scratch  # for the folders of short runs
            exit_at_once_on_interrupt(scratch)
            search(arguments, flags)
    except OSError as error:
        raise ConfigError(f"--output: {arguments.output} cannot be written ({error.strerror}).") from None


def exit_at_once_on_interrupt(scratch: str) -> None:
    """A KeyboardInterrupt could be lost in an import, or wait for a run's threads."""

    def leave(*_: object) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        os.write(2, b"\nStopped by SIGINT. Nothing is written; the same command starts again.\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)


def search(arguments: argparse.Namespace, flags: list[str]) -> None:
    budget = parse_budget(arguments.budget)
    if arguments.seeds < 2:
        raise ConfigError("--seeds: at least 2, or there is no spread.")
    if arguments.steps < 1:
        raise ConfigError("--steps: at least 1.")
    config = ConfigManager().parse_args(
        [f"--job.config_file={arguments.config}", *flags, f"--training.steps={arguments.steps}"]
    )
    from torchtitan.engine.model_args import register_models

    register_models(config)
    if config.precision.phase:
        raise ConfigError("[[precision.phase]]: the search is for one precision throughout; remove the phases.")

    from torchtitan.precision_search import fragment
    from torchtitan.precision_search.picture import draw
    from torchtitan.precision_search.runs import short_run
    from torchtitan.precision_search.search import LossModel, Table

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    candidates = candidates_of(config)
    bf16 = in_bf16(config)
    first = short_run(bf16, capture=True)
    base = final_loss(first.losses)
    seeds = range(config.training.seed + 1, config.training.seed + arguments.seeds)
    if config.checkpoint.initial_load_path:  # which gives the weights, so the data differ
        others = [final_loss(short_run(with_seed(bf16, seed)).losses) for seed in seeds]
    else:
        others = [final_loss(short_run(bf16, weights_seed=seed).losses) for seed in seeds]
    spread = 100 * statistics.stdev([base, *others]) / base

    rates = DEVICES[arguments.device]
    if arguments.gemms_only:
        rates = dataclasses.replace(rates, bandwidth=math.inf)
    optimizer = config.optimizer
    momentum = optimizer.muon_momentum if optimizer.name.startswith("Muon") else optimizer.beta1
    table = Table.of(candidates, first.operands, rates, momentum)
    first.operands.clear()

    print(f"bf16: loss {base:.4f} after {arguments.steps} steps, standard deviation {spread:.2f}%", flush=True)

    def measure(what: str, assignment: dict[str, int | None]) -> float:
        """The loss above bf16's, in percent."""
        tables = fragment.tables_of(table.candidates, assignment)
        percent = 100 * (final_loss(short_run(with_tables(bf16, tables)).losses) / base - 1)
        print(f"{what}: loss {percent:+.2f}%", flush=True)
        return percent

    names = [candidate.name for candidate in candidates]
    calibration = {
        index: measure(f"{names[index]} in all layers", table.throughout(index))
        for index in (table.calibrating() if budget else [])
    }
    noises = [table.noise(table.throughout(index)) for index in calibration]
    model = LossModel.fit(noises, list(calibration.values()), spread)
    assignment = table.fastest(model.noise(budget))
    converted = [fqn for fqn, index in assignment.items() if index is not None]
    predicted = model.percent(table.noise(assignment))
    measured = measure("the assignment found", assignment) if converted else 0.0

    tables = fragment.tables_of(table.candidates, assignment)
    unconverted = table.seconds(dict.fromkeys(assignment))
    report: dict[str, Any] = {
        "config": str(arguments.config),
        "budget_percent": budget,
        "steps": arguments.steps,
        "bf16_loss": base,
        "spread_percent": spread,
        "calibration_percent": {names[index]: percent for index, percent in calibration.items()},
        "percent_per_noise": model.percent_per_noise if calibration else None,
        "predicted_percent": predicted,
        "measured_percent": measured,
        "time_of_linear_layers": table.seconds(assignment) / unconverted,
        "device": arguments.device,
        "assignment": {fqn: "bf16" if index is None else names[index] for fqn, index in assignment.items()},
        "layers": table.to_json(),
    }
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # so that the files belong together
    toml, details, picture = (Path(f"{arguments.output}.{kind}") for kind in ("toml", "json", "png"))
    toml.write_text(fragment.to_toml(tables), encoding="utf-8")
    details.write_text(json.dumps(finite(report), indent=1), encoding="utf-8")
    draw(table, assignment, model if calibration else None, picture)
    print_report(report, table.gains(), len(converted), tables)


def parse_budget(text: str) -> float:
    """Percent."""
    try:
        budget = float(text.strip().removesuffix("%"))
    except ValueError:
        budget = math.nan
    if not 0 <= budget < math.inf:
        raise ConfigError(f"--budget: {text!r} is not a percentage of the loss, such as 0.5%.")
    return budget


def final_loss(losses: list[float]) -> float:
    return statistics.mean(losses[-LAST:])


def in_bf16(config: JobConfig) -> JobConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, converters=[]))


def with_seed(config: JobConfig, seed: int) -> JobConfig:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, seed=seed))


def with_tables(config: JobConfig, tables: dict[str, dict[str, Any]]) -> JobConfig:
    sections = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in tables.items()}
    return dataclasses.replace(config, **sections)


def candidates_of(config: JobConfig) -> list[Any]:
    """Recipes that run on this device. Raises ConfigError if there are none, or if a filter does not fit the model."""
    from torchtitan.device import find_device
    from torchtitan.engine.explain import conversion_target
    from torchtitan.models import MODELS
    from torchtitan.precision_search.candidates import find_candidates

    found = find_candidates(config, conversion_target(config, MODELS.get(config.model.name), find_device(0)))
    if not found:
        raise ConfigError("none of the recipes runs on this device; the log says why.")
    return found


def print_report(report: dict[str, Any], gains: bool, converted: int, tables: dict[str, dict[str, Any]]) -> None:
    from torchtitan.precision_search import fragment

    total = len(report["assignment"])
    if not converted:
        why = (
            "the budget allows none."
            if gains
            else f"on {report['device']} no layer would be faster (they are too small, or --device lacks the GEMMs)."
        )
        print(f"no layer is converted: {why}")
        return
    print(
        f"{converted} of {total} linear layers converted, which take {report['time_of_linear_layers']:.2f} of their "
        f"bf16 time (modelled, {report['device']})\nloss: predicted {report['predicted_percent']:+.2f}%, measured "
        f"{report['measured_percent']:+.2f}%, budget {report['budget_percent']:.2f}%"
    )
    if report["measured_percent"] > max(report["budget_percent"], report["spread_percent"]):
        print("the measured loss exceeds the budget: lower --budget, or raise --steps to measure better")
    flags = shlex.join(fragment.to_flags(tables))
    print(f"\n{fragment.to_toml(tables)}\nCONFIG_FILE={shlex.quote(report['config'])} ./run_train.sh {flags}")


if __name__ == "__main__":
    run_command(main)
