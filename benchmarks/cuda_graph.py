"""Whether a training step can be a CUDA graph: ten steps with and without one, their losses and times.

python -m benchmarks cuda_graph [--models 1B,8B] [--rows "int8 rowwise weights once a step"] [--output FILE] [--smoke]

A graph launches all kernels of a step at once, so the host no longer matters; it cannot wait for the device, and its
memory stays where it was. For each of gpu.py's rows, ten steps of one batch are trained, then weights and states are
set back and the captured step is replayed ten times: losses must be equal to the bit. Where capturing fails, the reason
is the result. A JSON line for each row, as it ends. `--smoke`: tiny shapes, any device; on a CPU nothing is captured.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import SEQ_LEN
from benchmarks.gpu_row import LEARNING_RATE, WARMUP, Bench
from benchmarks.gpu_rows import BASE, INT8_ONCE, MODELS, Recipe, Shape
from benchmarks.runs import ROOT
from benchmarks.tables import markdown
from torchtitan.device import Device
from torchtitan.engine.engine import Engine, train_step
from torchtitan.optim.combined import optimizers_in
from torchtitan.parallel.sharded_tensors import local_tensor

STEPS = 10
RECIPES = (BASE, INT8_ONCE)
NAMES = [recipe.name.replace(",", "") for recipe in RECIPES]


def state_of(engine: Engine) -> list[torch.Tensor]:
    """Weights, and the optimizer's states."""
    states = (
        value
        for single in optimizers_in(engine.optimizer)
        for state in single.state.values()
        for value in state.values()
    )
    tensors = [*engine.model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
    return [local_tensor(tensor.detach()) for tensor in tensors]


def timed(device: Device, step: Callable[[], torch.Tensor]) -> tuple[list[float], float]:
    """The losses of ten steps, and the mean seconds of one."""
    losses = []
    device.synchronize()
    start = perf_counter()
    for _ in range(STEPS):
        losses.append(step().clone())
    device.synchronize()
    return [float(loss) for loss in losses], (perf_counter() - start) / STEPS


def compare(bench: Bench, shape: Shape, recipe: Recipe) -> dict[str, Any]:
    """Losses and seconds of a step of both ways."""
    engine, _, batches = bench.build(shape, bench.layers_that_fit(shape), recipe)
    device, captures = bench.device, bench.device.type == "cuda"
    # A graph reads its input where it was.
    tokens, labels = (part.to(device.torch_device) for part in (batches[0].tokens, batches[0].labels))
    batch = replace(batches[0], tokens=tokens, labels=labels)

    def step() -> torch.Tensor:
        return train_step(engine, [batch], LEARNING_RATE)[0]

    for single in optimizers_in(engine.optimizer):
        for group in single.param_groups:
            group["capturable"] = captures
    device.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if captures else None):
        for _ in range(WARMUP):
            step()
    device.synchronize()
    before = [tensor.to("cpu", copy=True) for tensor in state_of(engine)]  # the GPU has no room for them
    losses, seconds = timed(device, step)
    for tensor, former in zip(state_of(engine), before, strict=True):
        tensor.copy_(former)
    replay = step
    if captures:
        torch.cuda.empty_cache()  # a graph has memory of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

    replayed, seconds_of_graph = timed(device, replay)
    return {"seconds": seconds, "of_graph": seconds_of_graph, "equal": losses == replayed, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1B,8B", help=f"from {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--rows", default=f"{NAMES[1]},{NAMES[0]}", help=f"from {', '.join(NAMES)} (%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "cuda_graph.jsonl")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, any device")
    arguments = parser.parse_args()
    models, wanted = arguments.models.split(","), arguments.rows.split(",")
    if unknown := [name for name in models if name not in MODELS] + [name for name in wanted if name not in NAMES]:
        sys.exit(f"unknown: {', '.join(unknown)}")
    bench, cells = Bench(arguments.smoke, SEQ_LEN, STEPS), []
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", encoding="utf-8") as file:
        for model, name in itertools.product(models, wanted):
            recipe = RECIPES[NAMES.index(name)]
            row, result = {"model": model, "recipe": recipe.name}, dict[str, Any]()
            try:
                result = compare(bench, MODELS[model], replace(recipe, compile=not arguments.smoke))
                verdict = "equal" if result["equal"] else "other losses"
                cells.append([*row.values(), f"{result['seconds'] / result['of_graph']:.2f}", verdict])
            except Exception as error:  # a row that fails is a result
                result["failed"] = f"{type(error).__name__}: {error}"[:2000]
                cells.append([*row.values(), "", result["failed"].splitlines()[0]])
            print(json.dumps({**row, **result}), file=file, flush=True)
            if "failed" in result or not bench.clean():
                break  # what is left in memory, or of a capture, would harm the next row
    bench.close()
    print(markdown(["model", "recipe", "speed of the graph", "losses"], cells))


if __name__ == "__main__":
    main()
