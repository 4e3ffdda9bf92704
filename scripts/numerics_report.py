"""Measures the accuracy of a recipe on a model in training, per layer and GEMM.

python scripts/numerics_report.py --output numerics --steps 20 --job.config_file=FILE.toml --model.converters=float8 ...

Trains `--steps` steps in bf16 and in the recipe, on the same data. In the last bf16 step it captures the operands of
each linear layer, and computes the layer's three GEMMs in the recipe and in float32. OUTPUT.json and OUTPUT.png hold
for each GEMM the signal-to-quantization-noise ratio in dB, and the fractions of operand values that saturated and that
were flushed to zero (the larger of the two operands' fractions).
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.extension import import_user_module
from torchtitan.errors import EXIT_STATUS, ConfigError, UserError

GEMMS = {"output": ("input", "weight"), "grad_input": ("out_grad", "weight"), "grad_weight": ("out_grad", "input")}
WORST_DB = 6.0  # this far below the median of its GEMM, a layer is unsuited to the recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="numerics", help="path of the files to write, without .json and .png")
    parser.add_argument("--steps", type=int, default=20)
    arguments, flags = parser.parse_known_args()
    try:
        config = ConfigManager().parse_args([*flags, f"--training.steps={arguments.steps}"])
        if config.experimental.custom_import:
            import_user_module(config.experimental.custom_import, "experimental.custom_import")
        if len(config.model.converters) != 1:
            raise ConfigError("model.converters: set exactly one converter, whose recipe is to be measured.")
        report = judge(config)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    draw(report["layers"], report["recipe"], output.with_suffix(".png"))
    print_table(report)


def judge(config: JobConfig) -> dict[str, Any]:
    """The report as one object: recipe, losses of both runs, layers, proposed filter_fqns."""
    from torchtitan.converters import CONVERTERS, LinearConverter
    from torchtitan.device import find_device
    from torchtitan.engine.explain import conversion_target
    from torchtitan.models import MODELS

    (name,) = config.model.converters
    entry = CONVERTERS.get(name)
    target = conversion_target(config, MODELS.get(config.model.name), find_device(0))
    converter = entry.build(getattr(config, entry.section), target)
    if not isinstance(converter, LinearConverter):
        raise ConfigError(
            f"model.converters: {name} does not convert linear layers, so there is nothing to measure; use another."
        )
    high_loss, operands = train(dataclasses.replace(config, model=dataclasses.replace(config.model, converters=[])))
    low_loss, _ = train(config)
    # A layer of experts that the recipe leaves in high precision has no errors.
    layers = {
        fqn: judge_layer(converter, *found) if len(found) == 3 else judge_experts(converter, *found)
        for fqn, found in operands.items()
        if len(found) == 3 or converter.grouped_gemms is not None
    }
    return {
        "recipe": f"{name} {converter.recipe}",
        "steps": config.training.steps,
        "loss": {"bf16": high_loss, "recipe": low_loss},
        "layers": layers,
        "proposed_filter_fqns": worst(layers),
    }


def train(config: JobConfig) -> tuple[float, dict[str, Any]]:
    """The last loss; and per layer (input, weight, out_grad) of the last step's first micro-batch; of experts (input,
    weight, ends of their rows, out_grad)."""
    import torch
    from torch import nn

    from torchtitan.build_trainer import build_trainer
    from torchtitan.device import find_device
    from torchtitan.engine.config_checks import check, global_batch_size
    from torchtitan.models.moe import GroupedLinear

    operands: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = dataclasses.replace(config.job, dump_folder=folder)
        plain = dataclasses.replace(config.activation_checkpoint, mode="none")
        metrics = dataclasses.replace(config.metrics, log_freq=1)
        training = dataclasses.replace(config.training, compile=False)
        config = dataclasses.replace(config, job=job, activation_checkpoint=plain, metrics=metrics, training=training)
        device = find_device(0)
        dims = check(config, 1, device.type)
        with build_trainer(config, dims, global_batch_size(config, dims), device) as trainer:
            model: nn.Module = trainer.engine.model

            def watch(fqn: str) -> Any:
                def hook(
                    module: nn.Linear | GroupedLinear, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
                ) -> None:
                    if trainer.step == config.training.steps and fqn not in operands:
                        x, weight = inputs[0].detach().flatten(0, -2), module.weight.detach().clone()
                        operands[fqn] = [x, weight, *inputs[1:]]  # experts have the ends of their rows as well
                        out.register_hook(lambda grad: operands[fqn].append(grad.detach().flatten(0, -2)))

                return hook

            for fqn, module in model.named_modules():
                if type(module) in (nn.Linear, GroupedLinear):
                    module.register_forward_hook(watch(fqn))
            trainer.train()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        entries = map(json.loads, lines)  # of a model with experts, some of their load
        return [entry["loss"] for entry in entries if "loss" in entry][-1], operands


def judge_layer(converter: Any, x: Any, weight: Any, out_grad: Any) -> dict[str, dict[str, float]]:
    """Per GEMM: sqnr_db, saturated, flushed."""
    import torch
    from torch import nn

    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    layer = converter.swap(linear)
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    found = [out.detach(), *torch.autograd.grad(out, [leaf, layer.weight], out_grad)]
    x, weight, out_grad = x.float(), weight.float(), out_grad.float()
    exact = [x @ weight.T, out_grad @ weight, out_grad.T @ x]
    lost = losses_of_operands(converter, x, weight, out_grad)
    return {
        gemm: {"sqnr_db": sqnr_db(low, high), **lost[gemm]} for gemm, low, high in zip(GEMMS, found, exact, strict=True)
    }


def judge_experts(converter: Any, x: Any, weight: Any, ends: Any, out_grad: Any) -> dict[str, dict[str, float]]:
    """`judge_layer` for a layer of all experts: over all of them, with the mean of their operands' fractions."""
    import torch

    from torchtitan.models.moe import GroupedLinear

    experts, n, k = weight.shape
    layer = GroupedLinear(experts, k, n).to(weight.device, weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer = converter.swap_grouped(layer)
    leaf = x.clone().requires_grad_()
    out = layer(leaf, ends)
    found = [out.detach(), *torch.autograd.grad(out, [leaf, layer.weight], out_grad)]
    exact: list[list[torch.Tensor]] = [[], [], []]
    lost: dict[str, list[dict[str, float]]] = {gemm: [] for gemm in GEMMS}
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for matrix, rows, grads in zip(
        weight.float(), x.float().split(counts), out_grad.float().split(counts), strict=True
    ):
        for results, high in zip(exact, (rows @ matrix.T, grads @ matrix, grads.T @ rows), strict=True):
            results.append(high)
        if len(rows) == 0:
            continue
        padded = [torch.nn.functional.pad(one, (0, 0, 0, -len(one) % 32)) for one in (rows, grads)]  # blocks of mx
        for gemm, fractions in losses_of_operands(converter, padded[0], matrix, padded[1]).items():
            lost[gemm].append(fractions)
    high_results = [torch.cat(exact[0]), torch.cat(exact[1]), torch.stack(exact[2])]
    return {
        gemm: {
            "sqnr_db": sqnr_db(low, high),
            **{key: sum(one[key] for one in lost[gemm]) / len(lost[gemm]) for key in ("saturated", "flushed")},
        }
        for gemm, low, high in zip(GEMMS, found, high_results, strict=True)
    }


def sqnr_db(low: Any, high: Any) -> float:
    """Signal-to-quantization-noise ratio of a GEMM's result."""
    import torch

    noise = (low.float() - high).norm()
    return float(20 * torch.log10(high.norm() / noise)) if noise > 0 else float("inf")


def losses_of_operands(converter: Any, x: Any, weight: Any, out_grad: Any) -> dict[str, dict[str, float]]:
    """Per GEMM: saturated, flushed."""
    # Each GEMM sums over a different dimension of its operands.
    columns = {
        "output": (x, weight),
        "grad_input": (out_grad, weight.T),
        "grad_weight": (out_grad.T, x.T),
    }
    result = {}
    for gemm, roles in GEMMS.items():
        saturated, flushed = [], []
        for role, operand in zip(roles, columns[gemm], strict=True):
            scaled = converter.scaled(operand, role)
            saturated.append((scaled.exact.abs() > 1.0001 * scaled.largest).float().mean().item())
            flushed.append(((scaled.exact != 0) & (scaled.rounded == 0)).float().mean().item())
        result[gemm] = {"saturated": max(saturated), "flushed": max(flushed)}
    return result


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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values = [[gemms[gemm]["sqnr_db"] for gemm in GEMMS] for gemms in layers.values()]
    figure, axes = plt.subplots(figsize=(6, 1.5 + 0.2 * len(layers)))
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(GEMMS)), list(GEMMS))
    axes.set_yticks(range(len(layers)), list(layers), fontsize="x-small")
    axes.set_title(f"{title}: signal to quantization noise")
    figure.colorbar(image, label="dB")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
