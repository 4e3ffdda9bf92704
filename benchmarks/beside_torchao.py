"""Our low-precision layers and optimizers beside torchao's of the same names, on this machine.

python -m benchmarks beside_torchao [--tokens 1024] [--size 1024] [--rounds 5]

A layer: milliseconds of a forward and backward pass of one linear layer, compiled, and the largest relative error
(2-norm) of its output and gradients against float64. An optimizer: milliseconds of an eager update of one square
matrix. Medians of rounds in which both take turns.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.machine import measure_machine
from benchmarks.tables import markdown
from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import Target, apply_converters
from torchtitan.optim.low_bit_adamw import LowBitAdamW

LAYERS: dict[str, tuple[str, Any]] = {
    "float8 tensorwise": ("float8", Float8()),
    "float8 rowwise": ("float8", Float8(recipe_name="rowwise")),
    "int8 rowwise": ("int8", Int8()),
    "mx mxfp8, emulated": ("mx", MX(emulate=True)),
}
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def of_torchao(name: str, linear: nn.Linear) -> Any:
    """torchao's layer with the same weight."""
    if name.startswith("float8"):
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

        low: Any = Float8Linear.from_float(linear, Float8LinearConfig.from_recipe_name(name.split()[1]))
        return low
    if name.startswith("int8"):
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        model = nn.Sequential(linear)
        quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
        return model
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    with torch.device("meta"):
        layer = MXFP8Linear(
            linear.in_features, linear.out_features, bias=False, kernel_preference=KernelPreference.EMULATED,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
        )  # fmt: skip
    layer.weight = linear.weight
    return layer


def timed(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each, in turn."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, measured in zip(calls, seconds, strict=True):
            start = perf_counter()
            call()
            if number:
                measured.append(perf_counter() - start)
    return [1e3 * statistics.median(measured) for measured in seconds]


def layers(tokens: int, size: int, rounds: int) -> str:
    torch.manual_seed(0)
    linear = nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    x, grad = (torch.randn(tokens, size, dtype=torch.bfloat16) for _ in range(2))
    exact = grad.double() @ linear.weight.double(), grad.double().T @ x.double(), x.double() @ linear.weight.double().T
    rows = []
    for name, (converter, section) in LAYERS.items():
        model = nn.Sequential(copy.deepcopy(linear))
        apply_converters(model, [converter], {converter: section}.__getitem__, Target("cpu"))
        steps, errors = [], []
        for layer in (model, of_torchao(name, copy.deepcopy(linear))):
            compiled = torch.compile(layer)

            def step(compiled: Any = compiled, layer: nn.Module = layer) -> list[torch.Tensor]:
                of_input = x.clone().requires_grad_()
                for parameter in layer.parameters():
                    parameter.grad = None
                out = compiled(of_input)
                out.backward(grad)
                (weight,) = (parameter.grad for parameter in layer.parameters())
                assert of_input.grad is not None and weight is not None
                return [of_input.grad, weight, out.detach()]

            errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(step(), exact, strict=True)))
            steps.append(step)
        ours, theirs = timed(list(steps), rounds)
        rows.append(
            [name, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}", *(f"{error:.4f}" for error in errors)]
        )
    columns = ["layer", "ours, ms", "torchao's, ms", "ratio", "our largest error", "torchao's"]
    return markdown(columns, rows)


def optimizers(size: int, rounds: int) -> str:
    import torchao.optim

    rows = []
    for name in OPTIMIZERS:
        steps = []
        for ours in (True, False):
            weight = nn.Parameter(torch.randn(size, size))
            weight.grad = torch.randn(size, size)
            settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
            optimizer: torch.optim.Optimizer = (
                LowBitAdamW([weight], **settings, quantization=name.removeprefix("AdamW").lower())
                if ours
                else getattr(torchao.optim, name)([weight], **settings)
            )

            def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
                with torch.compiler.set_stance("force_eager"):
                    optimizer.step()

            steps.append(step)
        mine, theirs = timed(list(steps), rounds)
        rows.append([name, f"{mine:.1f}", f"{theirs:.1f}", f"{theirs / mine:.2f}"])
    return markdown(["optimizer", "ours, ms", "torchao's, ms", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tokens, size, rounds = arguments.tokens, arguments.size, arguments.rounds
    print(f"{tokens} tokens, {size} x {size}: {measure_machine(sizes=())}, torchao {version('torchao')}")
    print(layers(tokens, size, rounds), optimizers(size, rounds), sep="\n\n")


if __name__ == "__main__":
    main()
