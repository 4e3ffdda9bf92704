"""Costs and savings of smaller optimizer states: three tables.

python -m benchmarks optimizers [--only errors bytes peaks] [--error-steps 30]

errors: each optimizer's update compared with the float32 one, from the same weights and gradient history.
bytes: of an 8B model, as planned (`--job.plan`).
peaks: peak bytes of live tensors on 1 and 2 processes, with updates after and during the backward pass.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.runs import DEBUG_MODEL, ROOT, finish
from benchmarks.tables import markdown

CHANGES: dict[str, dict[str, str]] = {
    "AdamW": {},
    "AdamW, bfloat16 states": {"state_dtype": "bfloat16"},
    "AdamW8bit": {"name": "AdamW8bit"},
    "AdamW4bit": {"name": "AdamW4bit"},
    "AdamWFp8, v": {"name": "AdamWFp8"},
    "AdamWFp8, sqrt_v": {"name": "AdamWFp8", "second_moment": "sqrt_v"},
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
TABLES = ("errors", "bytes", "peaks")


def update_errors(steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """By optimizer: the relative error of each step's update, in the 2-norm over all parameters; and for the last step
    the fraction of elements whose nonzero second moment is stored as 0.

    AdamW in float32 trains the debug model. The others receive its weights and gradients before each of its steps.
    """
    import torch

    from benchmarks.peak_memory import NoReport
    from torchtitan.checks.config_checks import check
    from torchtitan.config import ConfigManager
    from torchtitan.config.training import Optimizer
    from torchtitan.device import find_device
    from torchtitan.optim.low_bit_adamw import LowBitAdamW
    from torchtitan.optim.optimizer import build_optimizer
    from torchtitan.parallel.sharded_tensors import local_tensor
    from torchtitan.run.build_trainer import build_trainer

    errors: dict[str, list[float]] = {name: [] for name in CHANGES if name != "AdamW"}
    flushed: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = [*DEBUG, f"--job.dump_folder={folder}", "--training.local_batch_size=8", f"--training.steps={steps}"]
        config = ConfigManager().parse_args(flags)
        dims = check(config, 1, "cpu")
        with build_trainer(config, dims, find_device(0)) as trainer:
            exact = trainer.engine.optimizer
            parameters = list(trainer.engine.model.parameters())
            others = {name: [torch.nn.Parameter(local_tensor(it).clone()) for it in parameters] for name in errors}
            optimizers: dict[str, Any] = {}
            for name, them in others.items():
                section = Optimizer(**{**vars(config.optimizer), **CHANGES[name]})
                optimizers[name] = build_optimizer(torch.nn.ParameterList(them), section)
            before: list[torch.Tensor] = []

            @torch.no_grad()
            def step_others(*_: Any) -> None:
                before[:] = [local_tensor(parameter).clone() for parameter in parameters]
                for name, them in others.items():
                    for mine, start, parameter in zip(them, before, parameters, strict=True):
                        mine.copy_(start)
                        mine.grad = local_tensor(parameter.grad)  # type: ignore[arg-type]
                    optimizers[name].param_groups[0]["lr"] = exact.param_groups[0]["lr"]
                    optimizers[name].step()

            @torch.no_grad()
            def compare(*_: Any) -> None:
                for name, them in others.items():
                    triples = list(zip(them, before, map(local_tensor, parameters), strict=True))
                    off = sum(float((mine - right).square().sum()) for mine, _, right in triples)
                    whole = sum(float((right - start).square().sum()) for _, start, right in triples)
                    errors[name].append((off / whole) ** 0.5 if whole else 0.0)

            exact.register_step_pre_hook(step_others)
            exact.register_step_post_hook(compare)
            trainer.reporter = NoReport()  # type: ignore[assignment]
            for _ in range(steps):
                trainer.step += 1
                trainer.train_step(trainer.loader.next())
            for name, optimizer in optimizers.items():
                assert isinstance(optimizer, LowBitAdamW)
                lost = total = 0
                for mine, parameter in zip(others[name], parameters, strict=True):
                    nonzero = local_tensor(exact.state[parameter]["exp_avg_sq"]) > 0
                    stored = optimizer._formats[mine][1].read(optimizer.local_state(mine))
                    second_moment = stored.square() if optimizer.root else stored
                    lost += int(((second_moment == 0) & nonzero).sum())
                    total += int(nonzero.sum())
                flushed[name] = lost / total
    return errors, flushed


def errors_table(errors: dict[str, list[float]], flushed: dict[str, float]) -> str:
    last, rows = 20, []
    for name, values in errors.items():
        mean = sum(values[-last:]) / len(values[-last:])
        rows.append([name, f"{mean:.3g}", f"{max(values):.3g}", f"{flushed[name]:.2%}"])
    return markdown(["optimizer", "error of an update", "largest", "second moments lost to 0"], rows)


def bytes_table() -> str:
    """For Llama 3 8B: bytes per parameter, and GiB on each of 8 GPUs and of 2."""
    import torch

    from torchtitan.checks.config_checks import check
    from torchtitan.config import ConfigManager
    from torchtitan.models import MODELS
    from torchtitan.plan.devices import named_device
    from torchtitan.plan.extrapolation import Job, measure

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
            (measured,) = measure(Job(config, dims, args, [args.n_layers], alike=True, device=named_device("H100")))
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
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES)
    arguments = parser.parse_args()
    import torch

    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}")
    tables = {
        "errors": lambda: errors_table(*update_errors(arguments.error_steps)),
        "bytes": bytes_table,
        "peaks": peaks_table,
    }
    for name in arguments.only:
        print(f"\n{name}\n\n{tables[name]()}", flush=True)


if __name__ == "__main__":
    main()
