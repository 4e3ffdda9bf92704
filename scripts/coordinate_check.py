"""Coordinate check of muP: mean absolute activations by width over the first steps, standard beside mup.

python scripts/coordinate_check.py [--widths 64,128,256,512] [--depths 2] [--steps 6] [--output FILE.png] FLAGS

FLAGS are train.py's. Models are the flavor model.mup_base_flavor resized, with heads of the same width; with one
depth, the base has it too. In a correct parametrization no curve rises with the width (with one width: the depth) as
training goes on (arXiv 2203.03466, appendix D.1).
"""

import argparse
import dataclasses
import functools
import itertools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a KeyboardInterrupt inside an import would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.errors import ConfigError, require_report_extra, run_command
from torchtitan.files import local_path

PARAMETRIZATIONS = ("standard", "mup")
PARTS = ("embedding", "attention", "feed-forward", "last block", "logits")
Size = tuple[int, int]  # width and depth
Activations = dict[tuple[str, Size], dict[str, list[float]]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--output", type=local_path, default="coordinate_check.png", help="PNG file to write (default: %(default)s)"
    )
    arguments, flags = parser.parse_known_args()
    require_report_extra("scripts/coordinate_check.py", "matplotlib")
    output = arguments.output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        config = resized(flags, arguments)
        config = with_values(config, "training", steps=arguments.steps)
        results: Activations = {}
        for name, size in itertools.product(PARAMETRIZATIONS, sizes_of(arguments)):
            results[name, size] = activations(with_size(config, name, size))
            print(
                f"{name} {label(size)}: "
                + ", ".join(f"{component} {y[-1]:.3g}" for component, y in results[name, size].items())
            )
        draw(results, output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written ({error.strerror}).") from None
    print(f"wrote {output}")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags for the sizes of models."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=numbers, default=[64, 128, 256, 512], help="default: 64,128,256,512")
    parser.add_argument("--depths", type=numbers, help="layers; default: the base's")
    return parser


def sizes_of(arguments: argparse.Namespace) -> list[Size]:
    return list(itertools.product(arguments.widths, arguments.depths))


def label(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def resized(flags: Sequence[str], arguments: argparse.Namespace) -> JobConfig:
    """The configuration, after registering a model family with a flavor of each size (called as by `label`) beside the
    usual flavors. Sets `arguments.depths` if they were not given."""
    from torchtitan.engine.model_args import register_models
    from torchtitan.models import MODELS

    config = ConfigManager().parse_args(list(flags))
    register_models(config)
    spec = MODELS.get(config.model.name)
    base: Any = spec.flavor(config.model.mup_base_flavor, "model.mup_base_flavor")
    arguments.depths = arguments.depths or [base.n_layers]
    flavors = {label(size): _resized(base, *size) for size in sizes_of(arguments)}
    if len(arguments.depths) == 1:  # compare widths alone
        flavors[config.model.mup_base_flavor] = dataclasses.replace(base, n_layers=arguments.depths[0])
    name = f"{config.model.name}, resized"
    if name not in MODELS.names():
        MODELS.register(name, dataclasses.replace(spec, flavors={**spec.flavors, **flavors}))
    return with_values(config, "model", name=name)


def _resized(base: Any, width: int, depth: int) -> Any:
    """The sizes of a model of this width and depth with the proportions, and the width of a head, of the base."""
    sizes: dict[str, Any] = {}
    for key in ("dim", "n_heads", "n_kv_heads", "ffn_dim"):
        number = getattr(base, key)
        sizes[key], rest = divmod(number * width, base.dim)
        if rest or not sizes[key]:
            raise ConfigError(f"--widths {width}: {key} is {number} at width {base.dim}, which cannot be scaled to it.")
    if base.moe is not None:
        sizes["moe"] = dataclasses.replace(base.moe, ffn_dim=base.moe.ffn_dim * width // base.dim)
    return dataclasses.replace(base, n_layers=depth, **sizes)


def with_values(config: JobConfig, section: str, **values: Any) -> JobConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def with_size(config: JobConfig, parametrization: str, size: Size) -> JobConfig:
    return with_values(config, "model", flavor=label(size), parametrization=parametrization)


def activations(config: JobConfig) -> dict[str, list[float]]:
    """Mean absolute activations of each part, averaged over layers: before the first step and after each one. All steps
    have the same batch, and the peak learning rate."""
    import torch

    from torchtitan.engine.engine import train_step
    from torchtitan.tools.temporary_trainer import temporary_trainer

    means: dict[str, list[float]] = {component: [] for component in PARTS}
    with temporary_trainer(config) as trainer:
        model: Any = trainer.engine.model
        batches = trainer.loader.next()
        blocks = list(model.layers.values())
        modules = {
            "embedding": [model.tok_embeddings],
            "attention": [block.attention for block in blocks],
            "feed-forward": [getattr(block, "moe", None) or block.feed_forward for block in blocks],
            "last block": blocks[-1:],
            "logits": [model.output],
        }
        for step in range(config.training.steps + 1):
            if step > 0:
                train_step(trainer.engine, batches, config.optimizer.lr)
            seen: dict[str, list[torch.Tensor]] = {component: [] for component in PARTS}

            def keep(module: Any, inputs: Any, out: torch.Tensor, seen: list[torch.Tensor]) -> None:
                seen.append(out.float().abs().mean())

            hooks = [
                module.register_forward_hook(functools.partial(keep, seen=seen[component]))
                for component in PARTS
                for module in modules[component]
            ]
            with torch.no_grad():
                model(batches[0].tokens.to(trainer.engine.device.torch_device))
            for hook in hooks:
                hook.remove()
            for component in PARTS:
                means[component].append(float(torch.stack(seen[component]).mean()))
    return means


def axis_of(sizes: Sequence[Size]) -> tuple[list[int], str]:
    """What to plot over: the widths, or the depths if there is one width."""
    if len({width for width, _ in sizes}) == 1:
        return [depth for _, depth in sizes], "layers"
    return [width for width, _ in sizes], "width"


def draw(results: Activations, output: Path) -> None:
    """A row for each parametrization, a panel for each part, a curve for each step."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    sizes = list(dict.fromkeys(size for _, size in results))
    steps = len(next(iter(results.values()))[PARTS[0]])
    x, x_label = axis_of(sizes)
    colors = colormaps["viridis"](np.linspace(0, 0.9, steps))
    figure = Figure(figsize=(2.2 * len(PARTS), 5), layout="constrained")
    rows = figure.subplots(2, len(PARTS), sharex=True, sharey=True)
    for row, name in zip(rows, PARAMETRIZATIONS, strict=True):
        for axes, component in zip(row, PARTS, strict=True):
            for step in range(steps):
                y = [results[name, size][component][step] for size in sizes]
                axes.plot(x, y, color=colors[step], marker=".", label=f"{step}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(x, [str(value) for value in x])
            axes.xaxis.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{component}, {name}", fontsize=9)
    rows[0][0].legend(title="step", fontsize=7, title_fontsize=7, loc="lower center", ncols=2)
    figure.supxlabel(x_label, fontsize=9)
    figure.supylabel("mean |activation|", fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150, format="png")


if __name__ == "__main__":
    run_command(main)
