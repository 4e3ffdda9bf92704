"""Mixtures of experts on CPU: a sparse layer beside the dense one with its active FLOPs, the share of dispatch and
combine in a step, and the loss of the debug models after the same tokens.

python -m benchmarks experts [--tokens 4096] [--steps 300] [--seeds 3] [--only layer,dispatch,loss] [--runs FOLDER]
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.loss_runs import LAST, losses, run
from benchmarks.machine import ask
from benchmarks.runs import DEBUG_MODEL, PROFILE_FREQ, PROFILED, Variant, train
from benchmarks.step_split import length, spans
from benchmarks.tables import markdown, spread
from torchtitan.device import find_device
from torchtitan.models import MODELS
from torchtitan.models.moe import MoE, reset_buffers
from torchtitan.models.transformer import FeedForward

ROUNDS = 11
SEQUENCE = 256
PARTS = ("layer", "dispatch", "loss")
MODEL = ("--model.name=qwen3_moe", "--moe.bias_update_speed=1e-2")


def layers(tokens: int) -> str:
    """Forward and backward pass of both layers of the debug models, in bfloat16."""
    dense, sparse = (MODELS.get(name).flavor("debugmodel") for name in ("qwen3", "qwen3_moe"))
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {
        "dense": FeedForward(dense.dim, dense.ffn_dim),  # type: ignore[attr-defined]
        "sparse": MoE(sparse.dim, sparse.moe),
    }
    rows = []
    for compiled in (False, True):
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for name, module in modules.items():
            for parameter in module.parameters():
                parameter.data = nn.init.normal_(
                    torch.empty_like(parameter), std=parameter.shape[-1] ** -0.5
                ).bfloat16()
            reset_buffers(module)
            ways[name] = torch.compile(module, fullgraph=True) if compiled else module
        x = torch.randn(tokens // SEQUENCE, SEQUENCE, dense.dim, dtype=torch.bfloat16, requires_grad=True)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 2):
            for name, layer in ways.items():
                start = perf_counter()
                layer(x).sum().backward()
                seconds[name].append(perf_counter() - start)
                modules[name].zero_grad()
        ratios = [other / base for base, other in zip(*(times[2:] for times in seconds.values()), strict=True)]
        row = [
            "compiled" if compiled else "eager",
            *(f"{statistics.median(of[2:]) * 1e3:.1f}" for of in seconds.values()),
        ]
        rows.append([*row, f"{statistics.median(ratios):.2f}", spread(ratios, "{:.2f}")])
    return markdown(["layer", "dense, ms", "sparse, ms", "ratio", "range"], rows)


def dispatch() -> str:
    """Of the traced steps on two processes: the time in which rows are exchanged, which includes waiting for the other
    process."""
    rows = []
    for name, flags in (("eager", []), ("compiled", ["--training.compile"])):
        variant = Variant(name, {"NGPU": "2"}, [*MODEL, "--parallelism.expert_parallel_degree=2", *flags])
        with tempfile.TemporaryDirectory() as folder:
            steps = PROFILE_FREQ * PROFILED
            train(
                variant, DEBUG_MODEL, ["--training.local_batch_size=8"], Path(folder),
                training__steps=steps, profiling__enable_profiling="true", profiling__profile_freq=PROFILE_FREQ,
            )  # fmt: skip
            shares = [share(path) for path in sorted(Path(folder).glob("profile_traces/iteration_*/rank0_trace.json"))]
        rows.append([name, f"{statistics.median(shares[1:]):.1%}"])
    return markdown(["2 processes, experts of each layer divided", "dispatch and combine, of a step"], rows)


def share(path: Path) -> float:
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    steps = length(spans(event for event in events if event["name"].startswith("ProfilerStep")))
    return length(spans(event for event in events if event["name"].startswith("torchtitan::exchange_"))) / steps


def loss(steps: int, seeds: int, folder: Path) -> str:
    """Of the dense and the sparse debug model."""
    rows = []
    for name, flags in (("dense", ["--model.name=qwen3"]), ("sparse", [*MODEL])):
        dumps = [run(f"{name} {seed}", [*flags, f"--training.seed={seed}"], steps, folder) for seed in range(seeds)]
        ends = [statistics.mean(losses(dump)[-LAST:]) for dump in dumps]
        rows.append([name, f"{statistics.mean(ends):.4f}", *(f"{end:.4f}" for end in ends)])
    head = ["model", f"loss, mean of the last {LAST} of {steps} steps"]
    return markdown([*head, *(f"seed {seed}" for seed in range(seeds))], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--runs", type=Path, help="folder of the runs, to continue an interrupted call")
    arguments = parser.parse_args()
    find_device(0)
    print(ask())
    wanted = arguments.only.split(",")
    if "layer" in wanted:
        print(f"\n{arguments.tokens} tokens\n\n{layers(arguments.tokens)}", flush=True)
    if "dispatch" in wanted:
        print(f"\n{dispatch()}", flush=True)
    if "loss" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{loss(arguments.steps, arguments.seeds, arguments.runs or Path(folder))}")


if __name__ == "__main__":
    main()
