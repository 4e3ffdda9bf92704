"""Errors of a block's gradients where tensor parallelism gathers tokens in 8 bits, so that columns are rounded after
rows, beside those where it gathers them in bf16. Against the same block in float64.

python -m benchmarks rounded_twice

Prints a Markdown table: of each weight gradient the relative error (2-norm), and of its worst input channel, with
columns rounded once and twice; first of one GEMM, whose operands are exact otherwise. Every 64th channel of the input
may be 30 or 100 times larger, as in trained models. One process; a group of one rank gathers.
"""

import functools
import platform
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.tables import markdown
from torchtitan.config.low_precision import Float8, Int8
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.formats import EightBit
from torchtitan.kernels.quantize import quantize, quantize_columns, quantize_columns_again
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.parallelize import SHARDING
from torchtitan.parallel.rounded_collectives import collectives_for
from torchtitan.parallel.tensor import apply_tensor_parallel

ARGS = LlamaArgs(dim=512, n_layers=1, n_heads=8, n_kv_heads=4, ffn_dim=1536, vocab_size=64)
TOKENS, OUTLIERS, FACTOR = 1024, slice(None, None, 64), 30

Rounding = Literal["float64", "once", "twice"]


def gradients(section: Float8 | Int8, rounding: Rounding, outliers: bool) -> dict[str, torch.Tensor]:
    """Weight gradients of a block, by name, in float64."""
    torch.manual_seed(0)
    model: Any = Llama(ARGS).bfloat16()
    x = torch.randn(1, TOKENS, ARGS.dim).bfloat16()
    direction = torch.randn_like(x) * torch.randn(1, TOKENS, 1).exp()  # gradients of tokens differ in size
    if outliers:
        with torch.no_grad():
            for norm in (model.layers["0"].attention_norm, model.layers["0"].ffn_norm):
                norm.weight[OUTLIERS] = FACTOR
    if rounding == "float64":
        model, x, direction = model.double(), x.double(), direction.double()
    else:
        name = "float8" if isinstance(section, Float8) else "int8"
        apply_converters(model, [name], lambda _: section, Target("cpu", tokens=TOKENS))
        if rounding == "twice":
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
            apply_tensor_parallel(model, SHARDING, mesh, functools.partial(collectives_for, overlaps=False))
    block = model.layers["0"]
    block(x.requires_grad_(), model.rope(0, TOKENS, x.device), None).backward(direction.to(x.dtype))
    of_weights = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.dim() == 2}
    return {
        name: (grad.to_local() if hasattr(grad, "to_local") else grad).double() for name, grad in of_weights.items()
    }


def errors_of_one_gemm(form: EightBit, factor: float) -> list[tuple[float, float]]:
    """The same of one weight gradient of normal data, once and twice."""
    torch.manual_seed(0)
    x, grad = torch.randn(TOKENS, ARGS.dim), torch.randn(TOKENS, ARGS.dim)
    x[:, OUTLIERS] *= factor
    x, grad = x.bfloat16(), grad.bfloat16()
    exact, found = grad.double().t() @ x.double(), []
    for twice in (False, True):
        left, right = (
            quantize_columns_again(*quantize(operand, form.scales, form.dtype), form.scales, form.dtype)
            if twice
            else quantize_columns(operand, form.scales, form.dtype)
            for operand in (grad, x)
        )
        difference = left.dequantize().double().t() @ right.dequantize().double() - exact
        channels = difference.norm(dim=0) / exact.norm(dim=0)
        found.append((float(difference.norm() / exact.norm()), float(channels.max())))
    return found


def errors(section: Float8 | Int8, outliers: bool) -> dict[str, dict[Rounding, tuple[float, float]]]:
    """By weight: (relative error, that of the worst input channel)."""
    exact = gradients(section, "float64", outliers)
    found: dict[str, dict[Rounding, tuple[float, float]]] = {name: {} for name in exact}
    once_or_twice: tuple[Rounding, Rounding] = ("once", "twice")
    for rounding in once_or_twice:
        for name, grad in gradients(section, rounding, outliers).items():
            difference, reference = grad - exact[name], exact[name]
            channels = difference.norm(dim=0) / reference.norm(dim=0)
            found[name][rounding] = float(difference.norm() / reference.norm()), float(channels.max())
    return found


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    EightBit.rounds_twice = property(lambda self: True)  # type: ignore[method-assign, assignment]  # int8, too
    sections: dict[str, Float8 | Int8] = {"float8 rowwise": Float8(recipe_name="rowwise"), "int8 rowwise": Int8()}
    forms = [EightBit(dtype, "rowwise") for dtype in (torch.float8_e4m3fn, torch.int8)]
    titles = [f"{name}, {how}" for name in sections for how in ("once", "twice")]
    rows = [
        [f"one GEMM{f', channels x {factor}' if factor > 1 else ''}"]
        + [f"{total:.4f} / {channel:.3f}" for form in forms for total, channel in errors_of_one_gemm(form, factor)]
        for factor in (1, 30, 100)
    ]
    for outliers in (False, True):
        of_sections = [errors(section, outliers) for section in sections.values()]
        for weight in of_sections[0]:
            cells = [of_section[weight][how] for of_section in of_sections for how in ("once", "twice")]
            label = weight.removesuffix(".weight") + (f", channels x {FACTOR}" if outliers else "")
            rows.append([label, *(f"{total:.4f} / {channel:.3f}" for total, channel in cells)])
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}\n")
    print(markdown(["gradient of", *titles], rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
