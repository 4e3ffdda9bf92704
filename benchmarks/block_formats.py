"""Errors of each recipe's three GEMMs against float64, on normal data and on data with outliers: two tables.

python -m benchmarks block_formats

One layer with float32 operands, so that only the recipe's own rounding shows. Outliers: every 64th channel of the input
is 30 times as large, and the gradients of tokens and of outputs differ in scale (lognormal, sigma 1).
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.tables import markdown

TOKENS, INPUTS, OUTPUTS = 1024, 512, 768


def recipes() -> dict[str, tuple[str, Any]]:
    from torchtitan.config.low_precision import MX, Float8, Int8

    nvfp4: dict[str, Any] = {"emulate": True, "recipe_name": "nvfp4"}
    mxint8: dict[str, Any] = {"emulate": True, "recipe_name": "mxint8"}
    return {
        "float8 rowwise": ("float8", Float8(recipe_name="rowwise")),
        "float8 blockwise": ("float8", Float8(recipe_name="blockwise")),
        "int8 rowwise": ("int8", Int8()),
        **{
            f"mx mxfp8, {mode}": ("mx", MX(emulate=True, scale_calculation_mode=mode))
            for mode in ("rceil", "even", "floor", "ceil")
        },
        "mx mxint8, rceil": ("mx", MX(**mxint8)),
        "mx mxint8, floor": ("mx", MX(**mxint8, scale_calculation_mode="floor")),
        "mx mxint8, floor, to -128": ("mx", MX(**mxint8, scale_calculation_mode="floor", symmetric_clipping=False)),
        "mx nvfp4": ("mx", MX(**nvfp4)),
        "mx nvfp4, no transform": ("mx", MX(**nvfp4, random_hadamard=False)),
        "mx nvfp4, round to nearest": ("mx", MX(**nvfp4, stochastic_rounding=False)),
        "mx nvfp4, 1D weight scales": ("mx", MX(**nvfp4, weight_scales_2d=False)),
    }


def operands(outliers: bool) -> tuple[Any, Any, Any]:
    """Input, weight and output gradient, float32."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    x, weight, out_grad = normal(TOKENS, INPUTS), normal(OUTPUTS, INPUTS), normal(TOKENS, OUTPUTS)
    if outliers:
        x[:, ::64] *= 30
        out_grad *= normal(TOKENS, 1).exp() * normal(1, OUTPUTS).exp()
    return x, weight, out_grad


def errors(converter: Any, x: Any, weight: Any, out_grad: Any) -> list[float]:
    """Of output, input gradient and weight gradient: relative, in the 2-norm."""
    import torch

    layer = converter.swap(torch.nn.Linear(INPUTS, OUTPUTS, bias=False))
    layer.weight.data.copy_(weight)
    x = x.clone().requires_grad_()
    out = layer(x)
    actual = [out.detach(), *torch.autograd.grad(out, [x, layer.weight], out_grad)]
    x, weight, out_grad = x.detach().double(), weight.double(), out_grad.double()
    exact = [x @ weight.T, out_grad @ weight, out_grad.T @ x]
    return [float((low - high).norm() / high.norm()) for low, high in zip(actual, exact, strict=True)]


def table(outliers: bool) -> str:
    from torchtitan.converters import CONVERTERS, Target

    data = operands(outliers)
    rows = []
    for name, (converter, section) in recipes().items():
        relative = errors(CONVERTERS.get(converter).build(section, Target("cpu")), *data)
        rows.append([name, *(f"{error:.4f}" for error in relative)])
    return markdown(["recipe", "output", "input gradient", "weight gradient"], rows)


def main() -> None:
    import torch

    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}\n")
    print(f"Normally distributed:\n\n{table(outliers=False)}\n")
    print(f"With outliers:\n\n{table(outliers=True)}")


if __name__ == "__main__":
    main()
