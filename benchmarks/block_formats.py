"""Errors of each recipe's three GEMMs against float64, on normal data and on data with outliers: two tables. And what
mxint8 would gain on this CPU from int8 GEMMs.

python -m benchmarks block_formats [--only errors,int8]

errors: one linear layer with float32 operands, so that only the recipe's own rounding shows. Outliers: every 64th
    channel of the input is 30 times as large, and the gradients of tokens and of outputs differ in scale (lognormal,
    sigma 1).
int8: the output GEMM of mxint8, emulated (rounding to blocks, and a bfloat16 GEMM), and as one int8 GEMM per block of
    32 channels, whose sums are scaled and added. Sizes of layers of the debug and the 100M model.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
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
    found = [out.detach(), *torch.autograd.grad(out, [x, layer.weight], out_grad)]
    x, weight, out_grad = x.detach().double(), weight.double(), out_grad.double()
    exact = [x @ weight.T, out_grad @ weight, out_grad.T @ x]
    return [float((low - high).norm() / high.norm()) for low, high in zip(found, exact, strict=True)]


def table(outliers: bool) -> str:
    from torchtitan.converters import CONVERTERS, Target

    data = operands(outliers)
    rows = []
    for name, (converter, section) in recipes().items():
        found = errors(CONVERTERS.get(converter).build(section, Target("cpu")), *data)
        rows.append([name, *(f"{error:.4f}" for error in found)])
    return markdown(["recipe", "output", "input gradient", "weight gradient"], rows)


SIZES = [(256, 256), (256, 768), (768, 768), (768, 2048)]  # inputs, outputs
ROUNDS = 41


def int8_ratios(inputs: int, outputs: int) -> list[float]:
    """Time of rounding both operands, and of int8 GEMMs of blocks, over that of the bfloat16 GEMM."""
    import torch

    from torchtitan.kernels.block_formats import FORMATS, quantize, round_to_blocks

    form = FORMATS["mxint8"].format
    x, weight = torch.randn(TOKENS, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    left, right = quantize(x, form), quantize(weight, form)
    exact = [operand.dequantize(torch.bfloat16) for operand in (left, right)]
    lefts = [part.mul(64).to(torch.int8).contiguous() for part in left.data.split(form.columns, 1)]
    rights = [part.mul(64).to(torch.int8).t().contiguous() for part in right.data.split(form.columns, 1)]
    scales = left.scale / 64, right.scale.t().contiguous() / 64

    def in_blocks() -> Any:
        out = torch.zeros(TOKENS, outputs)
        for place, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            out += torch._int_mm(left, right).float().mul_(scales[0][:, [place]]).mul_(scales[1][[place]])
        return out

    torch.testing.assert_close(in_blocks(), exact[0].float() @ exact[1].float().t(), rtol=1e-5, atol=1e-4)
    kinds: list[Callable[[], Any]] = [
        lambda: exact[0] @ exact[1].t(),
        lambda: (round_to_blocks(x, form), round_to_blocks(weight, form)),
        in_blocks,
    ]
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(ROUNDS):
        for times, run in zip(seconds, kinds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    gemm, *others = (statistics.median(times[1:]) for times in seconds)
    return [other / gemm for other in others]


def int8_table() -> str:
    rows = []
    for inputs, outputs in SIZES:
        rows.append([f"{TOKENS} x {inputs} x {outputs}", *(f"{ratio:.1f}" for ratio in int8_ratios(inputs, outputs))])
    return markdown(["tokens x inputs x outputs", "rounding both operands", "int8 GEMMs of blocks"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="errors,int8")
    wanted = parser.parse_args().only.split(",")
    import torch

    print(f"CPU, torch {torch.__version__}, torchao {version('torchao')}\n")
    if "errors" in wanted:
        print(f"Normally distributed:\n\n{table(outliers=False)}\n")
        print(f"With outliers:\n\n{table(outliers=True)}\n")
    if "int8" in wanted:
        print(f"Time relative to the bfloat16 GEMM, {torch.get_num_threads()} threads:\n\n{int8_table()}")


if __name__ == "__main__":
    main()
