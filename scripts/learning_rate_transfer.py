"""Whether the best learning rate stays put over sizes of a model: final losses by learning rate, standard beside mup.

python scripts/learning_rate_transfer.py [--widths 32,64,128,256] [--depths 2] [--rates 1e-3,2e-3,...] [--seeds 1]
    [--output FILE.png] FLAGS

FLAGS are train.py's. Models are the flavor model.mup_base_flavor resized, with heads of the same width; with one
depth, the base has it too. A loss is the mean of the last tenth of the steps, and of the seeds. Losses are kept beside
the picture, in FILE.json: what is there, under the same FLAGS, is not trained again.
"""

import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a KeyboardInterrupt inside an import would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from coordinate_check import (
    PARAMETRIZATIONS,
    Size,
    label,
    parser_of,
    resized,
    sizes_of,
    with_size,
    with_values,
)

from torchtitan.config import JobConfig
from torchtitan.errors import ConfigError, UserError, require_report_extra, run_command
from torchtitan.files import local_path

Losses = dict[tuple[str, Size], dict[float, float]]  # by parametrization, size and learning rate


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=local_path, default="learning_rate_transfer.png", help="default: %(default)s")
    parser.set_defaults(rates=[1e-3 * 2**power for power in range(6)], widths=[32, 64, 128, 256])
    arguments, flags = parser.parse_known_args()
    require_report_extra("scripts/learning_rate_transfer.py", "matplotlib")
    output, results = arguments.output, Losses()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        config = resized(flags, arguments)
        for name, size in itertools.product(PARAMETRIZATIONS, sizes_of(arguments)):
            sized = with_size(config, name, size)
            results[name, size] = {
                rate: float(np.mean([final_loss(sized, rate, seed, output, flags) for seed in range(arguments.seeds)]))
                for rate in arguments.rates
            }
        print_table(results)
        draw(results, output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written ({error.strerror}).") from None
    print(f"wrote {output}")


def final_loss(config: JobConfig, rate: float, seed: int, output: Path, flags: list[str]) -> float:
    """Of one run, or what the file of losses says; infinite if the run stopped because its loss was not finite."""
    from torchtitan.models import MODELS
    from torchtitan.tools.temporary_trainer import temporary_trainer

    file = Path(f"{str(output).removesuffix('.png')}.json")
    known = json.loads(file.read_text()) if file.exists() else {}
    base: Any = MODELS.get(config.model.name).flavor(config.model.mup_base_flavor)  # its depth may be changed
    key = (
        f"{config.model.parametrization}, {config.model.flavor}, base {base.dim} x {base.n_layers}, lr {rate:g}, "
        f"seed {seed}, {' '.join(flags)}"
    )
    if key not in known:
        config = with_values(config, "optimizer", lr=rate)
        config = with_values(config, "training", seed=seed)
        config = with_values(config, "metrics", log_freq=1)
        with temporary_trainer(config) as trainer:
            try:
                trainer.train()
            except UserError as error:
                print(f"{key}: {error}", file=sys.stderr)
            lines = (Path(trainer.config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
        losses = [entry["loss"] for entry in map(json.loads, lines) if entry.get("loss") is not None]
        last = losses[-max(1, config.training.steps // 10) :]
        known[key] = float(np.mean(last)) if len(losses) == config.training.steps else float("inf")
        file.write_text(json.dumps(known, indent=1))
        print(f"{key}: {known[key]:.4f}", file=sys.stderr, flush=True)
    return float(known[key])


def print_table(results: Losses) -> None:
    rates = list(next(iter(results.values())))
    print("| parametrization | size | " + " | ".join(f"{rate:g}" for rate in rates) + " |")
    print("|---|---|" + "---:|" * len(rates))
    for (name, size), losses in results.items():
        best = min(losses.values())
        cells = [f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in losses.values()]
        print(f"| {name} | {label(size)} | {' | '.join(cells)} |")


def draw(results: Losses, output: Path) -> None:
    """A panel for each parametrization, a curve for each size, a star at its best learning rate."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # needs no display and no global pyplot state

    sizes = list(dict.fromkeys(size for _, size in results))
    colors = colormaps["viridis"](np.linspace(0, 0.85, len(sizes)))
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, PARAMETRIZATIONS, strict=True):
        for size, color in zip(sizes, colors, strict=True):
            losses = results[name, size]
            best = min(losses, key=losses.__getitem__)
            axes.plot(list(losses), list(losses.values()), color=color, marker=".", label=label(size))
            axes.plot(best, losses[best], marker="*", markersize=13, color=color)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(losses), [f"{rate:g}" for rate in losses], fontsize=8)
        axes.set(title=name, xlabel="optimizer.lr")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    # Runs that diverged would hide the differences between the others.
    finite = [loss for losses in results.values() for loss in losses.values() if np.isfinite(loss)]
    best, worst = min(finite), max(min(losses.values()) for losses in results.values())
    panels[0].set_ylim(best - 0.1 * (worst - best), worst + 1.2 * (worst - best))
    panels[0].set_ylabel("final training loss")
    panels[1].legend(title="width x layers", fontsize=8, title_fontsize=8)
    figure.savefig(output, dpi=150, format="png")


if __name__ == "__main__":
    run_command(main)
