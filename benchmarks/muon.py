"""Muon beside AdamW: errors of its bfloat16 iteration, the cost of a step, and losses over tuned learning rates.

python -m benchmarks muon [--only errors,cost,losses,parts] [--steps 300] [--output docs/figures/muon.png]

errors: the orthogonalization in bfloat16 against float32, for normally distributed matrices.
cost: steps with either optimizer in turn, on the same weights and batches; --dim and --layers set the model.
losses: held-out losses of the debug model with 5 learning rates for each; Muon has three quarters of AdamW's steps.
parts: what each of Muon's settings changes.

Runs in --folder are not repeated.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import bare, label_ends, pyplot, saved
from benchmarks.loss_runs import run
from benchmarks.runs import DEBUG_MODEL
from benchmarks.tables import markdown

SHAPES = [(256, 256), (256, 768), (1024, 256), (768, 768)]
RATES = {"AdamW": [1e-3, 2e-3, 2.8e-3, 4e-3, 8e-3], "Muon": [2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.12e-2]}
SHARE = 0.75  # of the steps, in which Muon should reach AdamW's loss

MOMENTUM = "--optimizer.muon_momentum"
ROWS = "--optimizer.muon_row_normalization"
EMBEDDING = '\n[[optimizer.group]]\nparameters = ["tok_embeddings"]\nlr = 1.2e-2\n'
TUNED = "momentum 0.85, rows normalized, embedding at 0.012"
PARTS = {  # what is added to the configuration, and flags
    "defaults": ("", []),
    "embedding at 0.012": (EMBEDDING, []),
    "momentum 0.8": ("", [f"{MOMENTUM}=0.8"]),
    "momentum 0.9": ("", [f"{MOMENTUM}=0.9"]),
    "momentum 0.85, rows normalized": ("", [f"{MOMENTUM}=0.85", ROWS]),
    TUNED: (EMBEDDING, [f"{MOMENTUM}=0.85", ROWS]),
}
PARTS_RATE = 4e-3

BATCH = 32  # sequences
VALIDATION = ["--validation.enabled", "--validation.freq=25", "--validation.steps=40"]


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

    from torchtitan.checks.config_checks import check_run
    from torchtitan.config import ConfigManager
    from torchtitan.device import find_device
    from torchtitan.engine.engine import optimizer_step, train_step
    from torchtitan.models import MODELS, ModelSpec
    from torchtitan.optim.optimizer import build_optimizer
    from torchtitan.optim.skip_step import Skip
    from torchtitan.run.build_trainer import build_trainer

    debug = MODELS.get("llama3").flavors["debugmodel"]
    sizes = dataclasses.replace(debug, dim=dim, n_layers=layers, ffn_dim=3 * dim)
    MODELS.register("sized", ModelSpec({"sized": sizes}))
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model.name=sized", "--model.flavor=sized", "--activation_checkpoint.mode=none"]
        flags += [f"--training.seq_len={seq_len}", f"--training.local_batch_size={batch}"]
        config = ConfigManager().parse_args([*flags, f"--job.dump_folder={folder}"])
        dims, stages = check_run(config, 1, "cpu")
        with build_trainer(config, dims, stages, find_device(0)) as trainer:
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
                    optimizer_step(engine.optimizer, Skip())
                    engine.model.zero_grad()
                    if repetition:
                        updates[name].append(time.perf_counter() - start)
            count = trainer.engine.full.num_parameters
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
    """The held-out loss of each run; and the plot of the best of either optimizer."""
    lengths = {"AdamW": steps, "Muon": round(SHARE * steps)}
    curves = {
        "AdamW": {rate: held_out("AdamW", rate, steps, folder) for rate in RATES["AdamW"]},
        "Muon": {rate: muon(TUNED, rate, lengths["Muon"], folder) for rate in RATES["Muon"]},
    }
    last = {name: {rate: run[lengths[name]] for rate, run in runs.items()} for name, runs in curves.items()}
    best = {name: min(losses, key=losses.__getitem__) for name, losses in last.items()}
    target, reached = (last[name][rate] for name, rate in best.items())
    if output is not None:
        figure, axes = pyplot().subplots(figsize=(8, 4))
        figure.subplots_adjust(right=0.7)
        for name, rate in best.items():
            curve = curves[name][rate]
            axes.plot(list(curve), list(curve.values()), label=f"{name}, lr {rate:g}: {last[name][rate]:.3f}")
        axes.axhline(target, color="black", linewidth=0.5)
        axes.set(xlabel="step", ylabel="held-out loss", ylim=(None, 1.3 * target))
        bare(axes)
        label_ends(axes)
        saved(figure, output)
    rows = [
        [name, f"{rate:g}", f"{lengths[name]}", f"**{loss:.4f}**" if rate == best[name] else f"{loss:.4f}"]
        for name, losses in last.items()
        for rate, loss in losses.items()
    ]
    return markdown(["optimizer", "learning rate", "steps", "held-out loss"], rows) + (
        f"\n\nMuon's best is {reached / target - 1:+.2%} from AdamW's best."
    )


def settings_table(steps: int, folder: Path) -> str:
    """Muon's held-out loss by settings."""
    fewer = round(SHARE * steps)
    rows = [[name, f"{muon(name, PARTS_RATE, fewer, folder)[fewer]:.4f}"] for name in PARTS]
    return markdown([f"Muon, learning rate {PARTS_RATE:g}, {fewer} steps", "held-out loss"], rows)


def muon(settings: str, rate: float, steps: int, folder: Path) -> dict[int, float]:
    """`held_out` of Muon with these settings."""
    added, flags = PARTS[settings]
    file = folder / f"{settings.replace(' ', '_').replace(',', '')}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(DEBUG_MODEL.read_text() + added)
    return held_out("Muon", rate, steps, folder, settings, [f"--job.config_file={file}", *flags])


def held_out(
    name: str, rate: float, steps: int, folder: Path, settings: str = "", flags: Sequence[str] = ()
) -> dict[int, float]:
    """Losses on the same held-out text, by step. A step's own loss depends more on its few sequences."""
    title = " ".join(filter(None, [name, settings, f"{rate:g} {steps} steps"]))
    flags = [f"--optimizer.name={name}", f"--optimizer.lr={rate}", f"--training.local_batch_size={BATCH}", *flags]
    lines = (run(title, [*flags, *VALIDATION], steps, folder) / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="errors,cost,losses,parts")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("outputs/muon"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], str]] = {
        "errors": errors,
        "cost": lambda: cost(
            arguments.dim, arguments.layers, arguments.batch, arguments.seq_len, arguments.repetitions
        ),
        "losses": lambda: tuned(arguments.steps, arguments.folder, arguments.output),
        "parts": lambda: settings_table(arguments.steps, arguments.folder),
    }
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in sections]:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(sections)}")
    for name in names:
        print(f"\n{sections[name]()}", flush=True)


if __name__ == "__main__":
    main()
