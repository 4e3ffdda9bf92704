"""Costs and savings of smaller optimizer states: five tables.

python -m benchmarks optimizers [--only errors spread losses bytes peaks] [--error-steps 30] [--loss-steps 1000]

errors: each optimizer's update compared with the float32 one, from the same weights and gradient history.
spread: the same with random gradients whose magnitudes differ within a row, against float64, beside torchao's.
losses: of a model of 1 million parameters, trained with the 8-bit optimizers.
bytes: of an 8B model, as planned (`--job.plan`).
peaks: peak bytes of live tensors on 1 and 2 processes, with updates after and during the backward pass.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import loss_runs
from benchmarks.runs import DEBUG_MODEL, ROOT, finish
from benchmarks.tables import markdown

CHANGES: dict[str, dict[str, str]] = {
    "AdamW": {},
    "AdamW, bfloat16 states": {"state_dtype": "bfloat16"},
    "AdamW8bit": {"name": "AdamW8bit"},
    "AdamW4bit": {"name": "AdamW4bit"},
    **{
        f"AdamWFp8, {stored}": {"name": "AdamWFp8", "second_moment": stored}
        for stored in ("v", "sqrt_v", "v_e5m2", "sqrt_v_e5m2")
    },
}
BFLOAT16 = "--training.weight_dtype=bfloat16"
EARLY = ["--optimizer.early_step_in_backward", "--training.max_norm=inf", "--training.no_skip_nonfinite"]
FLAGS = {name: [f"--optimizer.{key}={value}" for key, value in changes.items()] for name, changes in CHANGES.items()}
PLANNED = {
    "AdamW": [],
    "AdamW, bfloat16 states": FLAGS["AdamW, bfloat16 states"],
    "AdamW8bit or AdamWFp8": FLAGS["AdamW8bit"],
    "AdamW4bit": FLAGS["AdamW4bit"],
    "AdamW, bfloat16 weights": [BFLOAT16],
    "AdamW8bit or AdamWFp8, bfloat16 weights": [*FLAGS["AdamW8bit"], BFLOAT16],
    "AdamW4bit, bfloat16 weights": [*FLAGS["AdamW4bit"], BFLOAT16],
    "AdamW, updates during backward": EARLY,
    "AdamW8bit, bfloat16 weights, updates during backward": [*FLAGS["AdamW8bit"], BFLOAT16, *EARLY],
}
DEBUG = [f"--job.config_file={DEBUG_MODEL}", "--training.seq_len=128"]
GIB = 2**30
TABLES = ("errors", "spread", "losses", "bytes", "peaks")


class Errors(NamedTuple):
    """Of one optimizer."""

    errors: list[float]  # of each step's update relative to AdamW's, in the 2-norm over all parameters
    largest: list[float]  # number in the update of each step, in learning rates
    lost: float  # the fraction of nonzero second moments that the last step stores as 0


def update_errors(steps: int) -> dict[str, Errors]:
    """By optimizer, AdamW among them.

    AdamW in float32 trains the debug model. The others receive its weights and gradients before each of its steps.
    """
    import torch

    from benchmarks.peak_memory import NoReport
    from torchtitan.checks.config_checks import check_run
    from torchtitan.config import ConfigManager
    from torchtitan.config.training import Optimizer
    from torchtitan.device import find_device
    from torchtitan.optim.low_bit_adamw import LowBitAdamW
    from torchtitan.optim.optimizer import build_optimizer, set_learning_rate
    from torchtitan.parallel.sharded_tensors import local_tensor
    from torchtitan.run.build_trainer import build_trainer

    errors: dict[str, list[float]] = {name: [] for name in CHANGES if name != "AdamW"}
    largest: dict[str, list[float]] = {name: [] for name in CHANGES}
    lost = dict.fromkeys(CHANGES, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        flags = [*DEBUG, f"--job.dump_folder={folder}", "--training.local_batch_size=8", f"--training.steps={steps}"]
        flags += ["--optimizer.lr=1e-3", "--lr_scheduler.warmup_steps=2"]
        config = ConfigManager().parse_args(flags)
        dims, stages = check_run(config, 1, "cpu")
        with build_trainer(config, dims, stages, find_device(0)) as trainer:
            exact = trainer.engine.optimizer
            parameters = list(trainer.engine.model.parameters())
            others = {name: [torch.nn.Parameter(local_tensor(it).clone()) for it in parameters] for name in errors}
            optimizers: dict[str, Any] = {}
            for name, them in others.items():
                section = Optimizer(**{**vars(config.optimizer), **CHANGES[name]})
                optimizers[name] = build_optimizer(torch.nn.ParameterList(them), section)
            before: list[torch.Tensor] = []
            decay_of = {it: group["weight_decay"] for group in exact.param_groups for it in group["params"]}
            decays = [decay_of[parameter] for parameter in parameters]

            @torch.no_grad()
            def step_others(*_: Any) -> None:
                before[:] = [local_tensor(parameter).clone() for parameter in parameters]
                for name, them in others.items():
                    for mine, start, parameter in zip(them, before, parameters, strict=True):
                        mine.copy_(start)
                        mine.grad = local_tensor(parameter.grad)  # type: ignore[arg-type]
                    set_learning_rate(optimizers[name], exact.param_groups[0]["lr"])
                    optimizers[name].step()

            @torch.no_grad()
            def compare(*_: Any) -> None:
                lr = exact.param_groups[0]["lr"]
                updated: dict[str, list[Any]] = {**others, "AdamW": [local_tensor(it) for it in parameters]}
                for name, them in updated.items():
                    moved = [
                        float((mine - start * (1 - lr * decay)).abs().max())
                        for mine, start, decay in zip(them, before, decays, strict=True)
                    ]
                    largest[name].append(max(moved) / lr)
                for name, them in others.items():
                    triples = list(zip(them, before, map(local_tensor, parameters), strict=True))
                    off = sum(float((mine - right).square().sum()) for mine, _, right in triples)
                    whole = sum(float((right - start).square().sum()) for _, start, right in triples)
                    errors[name].append((off / whole) ** 0.5 if whole else 0.0)

            exact.register_step_pre_hook(step_others)
            exact.register_step_post_hook(compare)
            trainer.instruments.reporter = NoReport()  # type: ignore[assignment]
            for _ in range(steps):
                trainer.step += 1
                trainer.train_step(trainer.loader.next())
            for name, optimizer in optimizers.items():
                assert isinstance(optimizer, LowBitAdamW)
                zeros = total = 0
                for mine, parameter in zip(others[name], parameters, strict=True):
                    nonzero = local_tensor(exact.state[parameter]["exp_avg_sq"]) > 0
                    stored = optimizer._formats[mine][1].read(optimizer.local_state(mine))
                    zeros += int(((stored == 0) & nonzero).sum())
                    total += int(nonzero.sum())
                lost[name] = zeros / total
    return {name: Errors(errors.get(name, [0.0]), largest[name], lost[name]) for name in CHANGES}


def errors_table(rows: dict[str, Errors]) -> str:
    last, cells = 20, []
    for name, row in rows.items():
        figures = [
            f"{mean(row.errors[-last:]):.3g}",
            f"{max(row.errors):.3g}",
            f"{max(row.largest):.3g}",
            f"{row.lost:.2%}",
        ]
        cells.append([name, *figures])
    columns = [
        "optimizer",
        "error of an update",
        "largest",
        "largest number, learning rates",
        "second moments lost to 0",
    ]
    return markdown(columns, cells)


SPREADS = (0, 1, 2, 3)


def spread_table() -> str:
    """30 updates of a matrix (64, 256) with gradients that are normal times a magnitude of their own, log-normal with
    the standard deviation of the column. Then the gradients of a random half stop for 30 updates, and begin again."""
    import torch
    import torchao.optim

    from torchtitan.config.training import Optimizer
    from torchtitan.optim.optimizer import build_optimizer

    def updates(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], spread: int, double: bool) -> Any:
        """(90, 64, 256), in learning rates."""
        generator = torch.Generator().manual_seed(0)
        magnitude = (torch.randn(64, 256, generator=generator) * spread).exp()
        stops = torch.rand(64, 256, generator=generator) < 0.5
        weight = torch.nn.Parameter(torch.zeros(64, 256, dtype=torch.float64 if double else torch.float32))
        optimizer = make([weight])
        made = []
        for step in range(90):
            gradient = torch.randn(64, 256, generator=generator) * magnitude
            weight.grad = gradient.masked_fill(stops & (30 <= step < 60), 0.0).to(weight.dtype)
            weight.data.zero_()
            optimizer.step()
            made.append(weight.detach().double().clone())
        return torch.stack(made)

    def ours(changes: dict[str, str]) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
        return lambda them: build_optimizer(torch.nn.ParameterList(them), Optimizer(lr=1.0, **changes))  # type: ignore[arg-type]

    rows = []
    adamw: Any = partial(torch.optim.AdamW, lr=1.0, betas=(0.9, 0.95))
    exact = {spread: updates(adamw, spread, double=True) for spread in SPREADS}
    makers: dict[str, Any] = {name: ours(changes) for name, changes in CHANGES.items()}
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        torchaos = getattr(torchao.optim, name)
        makers[f"torchao's {name}"] = partial(torchaos, lr=1.0, betas=(0.9, 0.95), block_size=128)
    with torch.compiler.set_stance("force_eager"):
        for name, make in makers.items():
            measured = [(updates(make, spread, False), exact[spread]) for spread in SPREADS]
            errors = [f"{float((actual - right).norm() / right.norm()):.3g}" for actual, right in measured]
            ratios = [f"{float(actual.abs().max() / right.abs().max()):.3g}" for actual, right in measured]
            rows.append([name, *errors, *ratios])
    columns = [f"error, spread {spread}" for spread in SPREADS] + [f"largest / AdamW's, {spread}" for spread in SPREADS]
    return markdown(["optimizer", *columns], rows)


def losses_table(steps: int) -> str:
    """The mean loss of the last 50 of `steps` steps with 4 sequences of 128 tokens, with one seed."""
    model = ["--experimental.custom_import=benchmarks.sizes", "--model.name=sizes", "--model.flavor=1M"]
    common = [*model, "--optimizer.lr=1e-3", "--training.local_batch_size=4", "--lr_scheduler.warmup_steps=50"]
    rows, exact = [], None
    with tempfile.TemporaryDirectory() as folder:
        for name in ("AdamW", *(name for name in CHANGES if name.startswith(("AdamWFp8", "AdamW8")))):
            dump = loss_runs.run(name, [*common, *FLAGS[name]], steps, Path(folder))
            loss = mean(loss_runs.losses(dump)[-50:])
            exact = exact or loss
            rows.append([name, f"{loss:.4f}", f"{loss / exact - 1:+.2%}"])
    return markdown(["optimizer", "loss", "against AdamW"], rows)


def bytes_table() -> str:
    """For Llama 3 8B: bytes per parameter, and GiB on each of 8 GPUs and of 2."""
    import torch

    from torchtitan.checks.config_checks import check
    from torchtitan.config import ConfigManager
    from torchtitan.models import MODELS
    from torchtitan.tools.plan.devices import named_device
    from torchtitan.tools.plan.extrapolation import SimulatedJob, measure

    rows = []
    spec = MODELS.get("llama3")
    args = spec.flavor("8B")
    with torch.device("meta"):
        whole: Any = spec.build(args)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    model = ["--model.flavor=8B", "--training.local_batch_size=1", "--training.seq_len=4096"]
    for name, flags in PLANNED.items():
        peaks = []
        for world_size in (8, 2):
            with tempfile.TemporaryDirectory() as folder:
                plan = ["--job.plan", f"--job.simulate_world_size={world_size}", f"--job.dump_folder={folder}"]
                plan.append("--training.mixed_precision_param=bfloat16")
                config = ConfigManager().parse_args([*plan, *model, "--activation_checkpoint.mode=full", *flags])
                dims = check(config, world_size, "cuda")
            job = SimulatedJob(config, dims, args, [args.n_layers], alike=True, device=named_device("H100"))
            (measured,) = measure(job)
            peaks.append(measured["peak",] / GIB)
            sizes = [measured[component,] for component in ("parameters", "gradients", "optimizer")]
        share = parameters / world_size
        a_parameter = [round(size / share, 2) for size in sizes]
        cells = [f"{number:g}" for number in (*a_parameter, round(sum(a_parameter), 2))]
        rows.append([name, *cells, *(f"{peak:.1f}" for peak in peaks)])
    return markdown(["optimizer", "weights", "gradients", "states", "sum", "peak of 8 GPUs, GiB", "of 2, GiB"], rows)


def peaks_table() -> str:
    """Measured with real tensors of the debug model, in MiB."""
    rows = []
    for processes in (1, 2):
        for sequences in (1, 8):
            flags = [
                *DEBUG,
                f"--training.local_batch_size={sequences}",
                "--activation_checkpoint.mode=full",
                "--parallelism.fsdp_reshard_after_forward=always",
                *EARLY[1:],
            ]
            measured = [_peak(processes, [*flags, *more]) for more in ([], EARLY[:1])]
            ordinary, early = (result["peak"] for result in measured)
            figures = [f"{size / 2**20:.1f}" for size in (measured[0]["gradients"], ordinary, early, ordinary - early)]
            rows.append([f"{processes}", f"{sequences} x 128", *figures])
    columns = ["processes", "batch", "all gradients, MiB", "peak after backward, MiB", "during, MiB", "saved, MiB"]
    return markdown(columns, rows)


def _peak(processes: int, flags: list[str]) -> dict[str, int]:
    command = [sys.executable, "-m", "torchtitan.launch", str(ROOT / "benchmarks" / "peak_memory.py"), *flags]
    line = next(line for line in finish(command, processes).splitlines() if line.startswith("{"))
    peaks: dict[str, int] = json.loads(line)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--error-steps", type=int, default=30)
    parser.add_argument("--loss-steps", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    arguments = parser.parse_args()
    import torch

    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}")
    tables = {
        "errors": lambda: errors_table(update_errors(arguments.error_steps)),
        "spread": spread_table,
        "losses": lambda: losses_table(arguments.loss_steps),
        "bytes": bytes_table,
        "peaks": peaks_table,
    }
    for name in arguments.only:
        print(f"\n{name}\n\n{tables[name]()}", flush=True)


if __name__ == "__main__":
    main()
