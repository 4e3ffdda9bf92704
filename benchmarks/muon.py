"""Muon beside AdamW: errors of its bfloat16 iteration, the cost of a step, and losses over tuned learning rates.

python -m benchmarks muon [--only errors,cost,losses] [--steps 300] [--output docs/figures/muon.png]

errors: the orthogonalization in bfloat16 against float32, for normally distributed matrices.
cost: steps with either optimizer in turn, on the same weights and batches; --dim and --layers set the model.
losses: the debug model, 5 learning rates for each (runs in --folder are not repeated), and how many steps Muon takes to
    reach AdamW's best loss.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import bare, label_ends, pyplot, saved
from benchmarks.loss_runs import LAST, losses, run
from benchmarks.tables import markdown

SHAPES = [(256, 256), (256, 768), (1024, 256), (768, 768)]
RATES = {"AdamW": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], "Muon": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]}


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
    """The loss of each run (mean of the last 20 steps), and the plot of the best of each."""
    by_rate: dict[str, dict[float, list[float]]] = {}
    for name, rates in RATES.items():
        for rate in rates:
            flags = [f"--optimizer.name={name}", f"--optimizer.lr={rate}"]
            by_rate.setdefault(name, {})[rate] = losses(run(f"{name} {rate:g}", flags, steps, folder))
    final = {name: {rate: statistics.mean(run[-LAST:]) for rate, run in runs.items()} for name, runs in by_rate.items()}
    best = {name: min(found, key=found.__getitem__) for name, found in final.items()}
    target = final["AdamW"][best["AdamW"]]
    curve = by_rate["Muon"][best["Muon"]]
    smooth = [statistics.mean(curve[max(0, end - LAST) : end]) for end in range(1, steps + 1)]
    reached = next((step for step, loss in enumerate(smooth, 1) if step >= LAST and loss <= target), None)
    rows = [[name, *(f"{loss:.4f}" for loss in found.values())] for name, found in final.items()]
    if output is not None:
        figure, axes = pyplot().subplots(figsize=(7, 4))
        for name in by_rate:
            axes.plot(range(1, steps + 1), by_rate[name][best[name]], label=f"{name}, lr {best[name]:g}")
        axes.axhline(target, linewidth=0.5)
        axes.set(xlabel="step", ylabel="training loss")
        bare(axes)
        label_ends(axes)
        saved(figure, output)
    share = f"step {reached}, {reached / steps:.2f} of the steps" if reached else "none"
    return (
        markdown(["optimizer, by learning rate", *(f"{rate:g}" for rate in RATES["AdamW"])], rows)
        + f"\n\nAdamW's best loss, {target:.4f}, is reached by Muon's best run at: {share}."
    )


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
