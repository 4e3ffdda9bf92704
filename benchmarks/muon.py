"""Muon beside AdamW: errors of its bfloat16 iteration, the cost of a step, and losses over tuned learning rates.

python -m benchmarks muon [--only errors,cost,losses] [--steps 300] [--output docs/figures/muon.png]

errors: the orthogonalization in bfloat16 against float32, for normally distributed matrices.
cost: steps with either optimizer in turn, on the same weights and batches; --dim and --layers set the model.
losses: the debug model, 5 learning rates for each (runs in --folder are not repeated): held-out losses, also of Muon
    over three quarters of the steps.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import bare, label_ends, pyplot, saved
from benchmarks.loss_runs import run
from benchmarks.tables import markdown

SHAPES = [(256, 256), (256, 768), (1024, 256), (768, 768)]
RATES = {"AdamW": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "Muon": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]}

BATCH = 32  # sequences
VALIDATION = ["--validation.enabled", "--validation.freq=25", "--validation.steps=40"]
SHARE = 0.75  # of the steps, in which Muon should reach AdamW's loss


def errors() -> str:
    """Relative errors in the 2-norm, and the singular values after the float32 iteration."""
    import torch

    from torchtitan.optim.orthogonalize import orthogonalize, polynomials

    rows = []
    for shape in SHAPES:
        matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        cells = []
        for steps in (polynomials(5), polynomials(5, polar_express=True)):
            exact = orthogonalize(matrix, steps)
            error = float((orthogonalize(matrix.bfloat16(), steps).float() - exact).norm() / exact.norm())
            values = torch.linalg.svdvals(exact)
            cells += [f"{error:.2%}", f"{float(values.min()):.2f} to {float(values.max()):.2f}"]
        rows.append([f"{shape[0]} x {shape[1]}", *cells])
    columns = ["matrix", "error in bfloat16", "singular values", "error, Polar Express", "singular values"]
    return markdown(columns, rows)


def cost(dim: int, layers: int, batch: int, seq_len: int, repetitions: int) -> str:
    """Seconds of a step in one process, and of its update alone."""
    import torch

    from torchtitan.build_trainer import build_trainer
    from torchtitan.config import ConfigManager
    from torchtitan.device import find_device
    from torchtitan.engine.config_checks import check, global_batch_size
    from torchtitan.engine.train_step import train_step
    from torchtitan.models import MODELS, ModelSpec
    from torchtitan.optim.optimizer import build_optimizer, optimizer_step

    debug = MODELS.get("llama3").flavors["debugmodel"]
    sizes = dataclasses.replace(debug, dim=dim, n_layers=layers, ffn_dim=3 * dim)
    MODELS.register("sized", ModelSpec({"sized": sizes}))
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model.name=sized", "--model.flavor=sized", "--activation_checkpoint.mode=none"]
        flags += [f"--training.seq_len={seq_len}", f"--training.local_batch_size={batch}"]
        config = ConfigManager().parse_args([*flags, f"--job.dump_folder={folder}"])
        dims = check(config, 1, "cpu")
        with build_trainer(config, dims, global_batch_size(config, dims), find_device(0)) as trainer:
            engines = {}
            for name in RATES:
                section = dataclasses.replace(config.optimizer, name=name)
                dtype = getattr(torch, trainer.config.training.mixed_precision_param)
                optimizer = build_optimizer(trainer.engine.model, section, dtype=dtype)
                engines[name] = dataclasses.replace(trainer.engine, optimizer=optimizer)
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            updates: dict[str, list[float]] = {name: [] for name in engines}
            for repetition in range(repetitions + 1):
                for name, engine in engines.items():
                    batches = trainer.loader.next()
                    start = time.perf_counter()
                    train_step(engine, batches, 1e-4)
                    if repetition:  # the first creates the states
                        seconds[name].append(time.perf_counter() - start)
                    for parameter in engine.model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    start = time.perf_counter()
                    optimizer_step(engine.optimizer, None)
                    engine.model.zero_grad()
                    if repetition:
                        updates[name].append(time.perf_counter() - start)
            count = trainer.engine.parameters
    base = statistics.median(seconds["AdamW"])
    rows = [
        [
            name,
            f"{statistics.median(seconds[name]):.2f}",
            f"{statistics.median(seconds[name]) / base:.2f}",
            f"{statistics.median(updates[name]):.2f}",
        ]
        for name in engines
    ]
    print(
        f"{count:,} parameters, {batch * seq_len:,} tokens a step, {repetitions} repetitions, torch {torch.__version__}"
    )
    return markdown(["optimizer", "step, s", "ratio", "update alone, s"], rows)


def tuned(steps: int, folder: Path, output: Path | None) -> str:
    """The held-out loss of each run, and of Muon's best learning rate over fewer steps; and the plot of the best."""
    found = {name: {rate: held_out(name, rate, steps, folder) for rate in rates} for name, rates in RATES.items()}
    best = {name: min(runs, key=lambda rate: runs[rate][steps]) for name, runs in found.items()}
    target = found["AdamW"][best["AdamW"]][steps]
    fewer = round(SHARE * steps)
    shorter = held_out("Muon", best["Muon"], fewer, folder)
    if output is not None:
        figure, axes = pyplot().subplots(figsize=(8, 4))
        figure.subplots_adjust(right=0.7)
        curves = {f"{name}, lr {rate:g}": found[name][rate] for name, rate in best.items()}
        for name, curve in {**curves, f"Muon, {fewer} steps": shorter}.items():
            axes.plot(list(curve), list(curve.values()), label=f"{name}: {curve[max(curve)]:.3f}")
        axes.axhline(target, color="black", linewidth=0.5)
        axes.set(xlabel="step", ylabel="held-out loss", ylim=(None, 1.3 * target))
        bare(axes)
        label_ends(axes)
        saved(figure, output)
    rows = [[name, *(f"{run[steps]:.4f}" for run in runs.values())] for name, runs in found.items()]
    return (
        markdown(["optimizer, by learning rate", *(f"{rate:g}" for rate in RATES["AdamW"])], rows)
        + f"\n\nAdamW's best held-out loss after {steps} steps is {target:.4f}. Muon's best learning rate ends at "
        + f"{shorter[fewer]:.4f} after {fewer} steps ({shorter[fewer] / target - 1:+.2%})."
    )


def held_out(name: str, rate: float, steps: int, folder: Path) -> dict[int, float]:
    """Losses on the same held-out text, by step. A step's own loss depends more on its few sequences."""
    flags = [f"--optimizer.name={name}", f"--optimizer.lr={rate}", f"--training.local_batch_size={BATCH}", *VALIDATION]
    lines = (run(f"{name} {rate:g} {steps} steps", flags, steps, folder) / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="errors,cost,losses")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("outputs/muon"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], str]] = {
        "errors": errors,
        "cost": lambda: cost(
            arguments.dim, arguments.layers, arguments.batch, arguments.seq_len, arguments.repetitions
        ),
        "losses": lambda: tuned(arguments.steps, arguments.folder, arguments.output),
    }
    for name in arguments.only.split(","):
        print(f"\n{parts[name]()}", flush=True)


if __name__ == "__main__":
    main()
