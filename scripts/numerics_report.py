"""Measures the accuracy of a recipe on a model in training, per layer and GEMM.

python scripts/numerics_report.py --output numerics --steps 20 --job.config_file=FILE.toml --model.converters=float8 ...

Trains `--steps` steps in bf16 and in the recipe, on the same data. In the last bf16 step it captures the operands of
each linear layer, and computes the layer's three GEMMs in the recipe and in float32. OUTPUT.json and OUTPUT.png hold
for each GEMM the signal-to-quantization-noise ratio in dB, the fractions of operand values that saturated and that were
flushed to zero (the larger of the two operands' fractions), and more (torchtitan/converters/numerics.py).
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.errors import ConfigError, require_report_extra, run_command
from torchtitan.files import local_path
from torchtitan.strict_json import finite

GEMMS = ("output", "grad_input", "grad_weight")
WORST_DB = 6.0  # this far below the median of its GEMM, a layer is unsuited to the recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=local_path, default="numerics", help="path of the files to write, without .json and .png"
    )
    parser.add_argument("--steps", type=int, default=20)
    arguments, flags = parser.parse_known_args()
    require_report_extra("scripts/numerics_report.py", "matplotlib")
    output = arguments.output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        config = ConfigManager().parse_args([*flags, f"--training.steps={arguments.steps}"])
        from torchtitan.engine.model_args import register_models

        register_models(config)
        if len(config.model.converters) != 1:
            raise ConfigError("model.converters: set exactly one converter, whose recipe is to be measured.")
        report = judge(config)
        Path(f"{output}.json").write_text(json.dumps(finite(report), indent=1), encoding="utf-8")
        draw(report["layers"], report["recipe"], Path(f"{output}.png"))
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written ({error.strerror}).") from None
    print_table(report)


def judge(config: JobConfig) -> dict[str, Any]:
    """The report as one object: recipe, losses of both runs, layers, proposed filter_fqns."""
    from torchtitan.converters import CONVERTERS
    from torchtitan.converters.numerics import layer_errors
    from torchtitan.device import find_device
    from torchtitan.engine.conversion import conversion_target
    from torchtitan.models import MODELS

    (name,) = config.model.converters
    entry = CONVERTERS.get(name)
    target = conversion_target(config, MODELS.get(config.model.name), find_device(0))
    converter: Any = entry.build(getattr(config, entry.section), target)
    if not hasattr(converter, "scaled"):
        raise ConfigError(
            f"model.converters: {name} does not convert linear layers, so there is nothing to measure; use another."
        )
    bf16 = dataclasses.replace(config, model=dataclasses.replace(config.model, converters=[]))
    (high, operands), (low, _) = short_run(bf16), short_run(config)
    layers = {
        fqn: layer_errors(converter, captured) for fqn, captured in operands.items() if can_convert(converter, captured)
    }
    if not layers:
        raise ConfigError(
            f"{name}: no linear layer can be converted, so there is nothing to measure; "
            f"sizes must be multiples of {converter.multiple_of}."
        )
    return {
        "recipe": f"{name} {converter.recipe}",
        "steps": config.training.steps,
        "loss": {"bf16": high[-1], "recipe": low[-1]},
        "layers": layers,
        "proposed_filter_fqns": worst(layers),
    }


def short_run(config: JobConfig) -> tuple[list[float], dict[str, Any]]:
    """Trains in this process, uncompiled, without activation checkpointing, in a temporary folder.

    Returns:
        The losses of all steps, and the operands of each unconverted linear layer in the first micro-batch of the last
        step, by path (`converters.numerics.Operands`).

    Raises:
        ConfigError: a loss is not finite; and what a run raises.
    """
    from torchtitan.converters.numerics import capture_operands
    from torchtitan.tools.temporary_trainer import temporary_trainer

    operands: dict[str, list[Any]] = {}
    config = dataclasses.replace(
        config,
        activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode="none"),
        metrics=dataclasses.replace(config.metrics, log_freq=1),
        training=dataclasses.replace(config.training, compile=False),
    )
    with temporary_trainer(config) as trainer:
        if not config.model.converters:
            capture_operands(trainer.engine.model, operands, lambda: trainer.step == config.training.steps)
        trainer.train()
        entries = map(json.loads, (Path(trainer.config.job.dump_folder) / "metrics.jsonl").read_text().splitlines())
        # Entries of a model with experts may hold only their load.
        losses = [entry["loss"] for entry in entries if "loss" in entry]
    if None in losses:
        precision = ", ".join(config.model.converters) or "bf16"
        raise ConfigError(
            f"a short run in {precision} has a loss that is not finite; lower optimizer.lr, or fix its data."
        )
    return losses, operands


def can_convert(converter: Any, operands: Any) -> bool:
    """Whether the recipe has GEMMs for these operands. The filter is ignored: the report is to propose one."""
    experts = len(operands) > 3
    sizes = [*operands[1].shape[-2:], *([] if experts else [len(operands[0])])]
    return not (experts and converter.grouped_gemms is None) and not any(size % converter.multiple_of for size in sizes)


def worst(layers: dict[str, Any]) -> list[str]:
    """Layers with a GEMM more than WORST_DB below the median of that GEMM."""
    from statistics import median

    proposed = []
    for fqn, gemms in layers.items():
        for gemm, values in gemms.items():
            middle = median(other[gemm]["sqnr_db"] for other in layers.values())
            if values["sqnr_db"] < middle - WORST_DB and fqn not in proposed:
                proposed.append(fqn)
    return proposed


def print_table(report: dict[str, Any]) -> None:
    losses = report["loss"]
    print(f"{report['recipe']}, step {report['steps']}: loss {losses['recipe']:.4f}, bf16 {losses['bf16']:.4f}")
    header = "  ".join(f"{gemm:>26}" for gemm in GEMMS)
    print(f"{'layer':32}{header}\n{'':32}" + "  ".join(f"{'dB  saturated  flushed':>26}" for _ in GEMMS))
    for fqn, gemms in report["layers"].items():
        cells = (f"{v['sqnr_db']:.1f}  {v['saturated']:9.2%}  {v['flushed']:7.2%}" for v in gemms.values())
        print(f"{fqn:32}" + "  ".join(f"{cell:>26}" for cell in cells))
    proposed = ",".join(report["proposed_filter_fqns"])
    print(f"proposed filter_fqns: {proposed or 'none; no layer stands out'}")


def draw(layers: dict[str, Any], title: str, path: Path) -> None:
    """A heat map: one row per layer, one column per GEMM, colored by dB."""
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    values = [[gemms[gemm]["sqnr_db"] for gemm in GEMMS] for gemms in layers.values()]
    figure = Figure(figsize=(6, 1.5 + 0.2 * len(layers)))
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(GEMMS)), list(GEMMS))
    axes.set_yticks(range(len(layers)), list(layers), fontsize="x-small")
    axes.set_title(f"{title}: signal to quantization noise")
    figure.colorbar(image, label="dB")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    run_command(main)
