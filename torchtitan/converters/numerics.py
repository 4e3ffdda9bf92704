"""Errors of a layer's three GEMMs in a recipe, on operands captured in training: M tokens, K inputs, N outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from torchtitan.converters.filter import FilterRules
from torchtitan.converters.target import Target
from torchtitan.models.moe import GroupedLinear

Role = Literal["input", "weight", "out_grad"]

# The operands of each GEMM. Each sums over a different dimension of them.
GEMMS: dict[str, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "grad_input": ("out_grad", "weight"),
    "grad_weight": ("out_grad", "input"),
}
Operands = Sequence[torch.Tensor]
"""(input, weight, out_grad) of a linear layer, (M, K), (N, K), (M, N); of a layer of experts (input, weight, ends of
their rows, out_grad), where the weight is (experts, N, K)."""
LayerErrors = Mapping[str, Mapping[str, float]]
"""By GEMM: see `layer_errors`."""


class Recipe(Protocol):
    """What is needed here of a `LinearConverter`, which see."""

    name: str
    gemms: Any
    grouped_gemms: Any
    rules: FilterRules
    target: Target

    def emulated(self) -> "Recipe": ...

    def swap(self, linear: nn.Linear) -> nn.Linear: ...

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear: ...

    def scaled(self, tensor: torch.Tensor, role: Role) -> Any: ...


def capture_operands(
    model: nn.Module, operands: dict[str, list[torch.Tensor]], wanted: Callable[[], bool] = lambda: True
) -> None:
    """Registers hooks that fill `operands`, by path, in the first forward and backward pass of each unconverted linear
    layer for which `wanted()`."""

    def watch(fqn: str) -> Any:
        def hook(module: nn.Linear | GroupedLinear, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            if wanted() and fqn not in operands:
                x, weight = inputs[0].detach().flatten(0, -2), module.weight.detach().clone()
                operands[fqn] = [x, weight, *inputs[1:]]  # experts have the ends of their rows as well
                out.register_hook(lambda grad: operands[fqn].append(grad.detach().flatten(0, -2)))

        return hook

    for fqn, module in model.named_modules():
        if type(module) in (nn.Linear, GroupedLinear):
            module.register_forward_hook(watch(fqn))
            if type(module) is nn.Linear:
                module.__class__ = _Called


class _Called(nn.Linear):
    """Its forward pass is its own, so that on a GPU the loss calls the output layer, instead of multiplying with its
    weight (`models/loss.py`), which no hook would see."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def layer_errors(converter: Recipe, operands: Operands) -> dict[str, dict[str, float]]:
    """The GEMMs in the recipe compared with float32. Converts a copy of the layer.

    Returns:
        By GEMM:
            sqnr_db: signal-to-quantization-noise ratio.
            relative_error: 2-norm of the difference over 2-norm of the exact result.
            cosine: between the result and the exact one.
            saturated, flushed: fractions of operand values that exceed the format's range and that become 0; the larger
                of the two operands', for experts their mean.
            update_error, update_bias (grad_weight only): root mean square error of AdamW's update relative to the
                update, which is the gradient over the root of its usual square: so errors in a row of small gradients
                count like those in a row of large ones. And the systematic part of this error, which momentum does not
                average out; 0 for experts, for which it is not measured.
    """
    found, exact, lost = _of_layer(converter, *operands) if len(operands) == 3 else _of_experts(converter, *operands)
    known = converter.gemms if len(operands) == 3 else converter.grouped_gemms
    errors = {}
    for gemm, low, high in zip(GEMMS, found, exact, strict=True):
        if getattr(known, gemm) is None:  # nothing is rounded
            lost[gemm] = dict.fromkeys(lost[gemm], 0.0)
        low = low.float()
        noise, signal = (low - high).norm(), high.norm()
        errors[gemm] = {
            "sqnr_db": float(20 * torch.log10(signal / noise)) if noise > 0 else float("inf"),
            "relative_error": float(noise / signal) if signal > 0 else 0.0,
            "cosine": float(nn.functional.cosine_similarity(low.flatten(), high.flatten(), dim=0)),
            **lost[gemm],
        }
    second_moment = usual_squares(exact[2])
    error = found[2].float() - exact[2]
    errors["grad_weight"]["update_error"] = _root_mean(error.square(), second_moment)
    errors["grad_weight"]["update_bias"] = 0.0
    if len(operands) == 3:
        x, weight, out_grad = operands
        errors["grad_weight"]["update_bias"] = _update_bias(converter, x, weight, out_grad, second_moment)
    return errors


def noise_of(fqn: str, errors: LayerErrors, sizes: Mapping[str, int], momentum: float) -> float:
    """What a layer adds to the loss, up to a factor that short runs measure (`precision_search.search.LossModel`).

    The errors of GEMMs are small and nearly independent, so the loss rises by a sum of their squares. AdamW moves every
    weight by about the learning rate. So an error of its update, relative to the update, costs alike in all weights:
    hence `update_error`, times the number of weights. An error of the output or of the input gradient reaches other
    gradients with about its own relative size. In a block, the residual connection carries most of them past the layer,
    so as many weights count as the layer has; but all gradients come through the output layer.

    Momentum b averages the random part of an update's error over steps, whose mean square becomes (1 - b) / (1 + b) of
    a step's, and leaves its systematic part, such as that of gradients rounded to 0. The output layer's input gradient
    counts as systematic too: training runs say so (docs/low_precision.md).

    Args:
        sizes: number of weights of each linear layer, by path.
        momentum: decay rate of the optimizer's first moment.
    """
    output, grad_input = (errors[gemm]["relative_error"] ** 2 for gemm in ("output", "grad_input"))
    update, bias = (errors["grad_weight"][key] ** 2 for key in ("update_error", "update_bias"))
    systematic = (1 + momentum) / (1 - momentum)
    if not _in_block(fqn):
        grad_input *= systematic
    return reached(fqn, sizes) * grad_input + sizes[fqn] * (output + max(update - bias, 0.0) + systematic * bias)


def reached(fqn: str, sizes: Mapping[str, int]) -> int:
    """Number of weights whose gradients a layer's input gradient reaches, in the sense of `noise_of`."""
    return sizes[fqn] if _in_block(fqn) else sum(sizes.values())


def _in_block(fqn: str) -> bool:
    return any(part.isdecimal() for part in fqn.split("."))


def usual_squares(grad: torch.Tensor) -> torch.Tensor:
    """An estimate of Adam's second moment from one gradient, (..., N, K): the product of the mean squares of its row
    and of its column over the mean of all (Adafactor, arXiv 1804.04235, section 3)."""
    squares = grad.square()
    rows, columns = squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True)
    return rows * columns / rows.mean(-2, keepdim=True)


def _root_mean(squares: torch.Tensor, second_moment: torch.Tensor) -> float:
    ratio = torch.where(second_moment > 0, squares / second_moment, 0.0)
    return float(ratio.mean().clamp(min=0).sqrt())


def _update_bias(
    converter: Recipe,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_grad: torch.Tensor,
    second_moment: torch.Tensor,
) -> float:
    """The errors of two halves of the tokens have the systematic error in common and are independent otherwise, so four
    times their product is on average the square of the systematic error of all tokens."""
    half = len(x) // 2 // converter.rules.multiple_of * converter.rules.multiple_of
    if half == 0:
        return 0.0
    errors = []
    for tokens in (slice(half), slice(half, 2 * half)):
        _, _, low = _gemms(_converted(converter, weight), x[tokens], out_grad[tokens])
        errors.append(low.float() - out_grad[tokens].float().T @ x[tokens].float())
    return _root_mean(4 * errors[0] * errors[1], second_moment)


Results = tuple[list[torch.Tensor], list[torch.Tensor], dict[str, dict[str, float]]]


def _of_layer(converter: Recipe, x: torch.Tensor, weight: torch.Tensor, out_grad: torch.Tensor) -> Results:
    found = _gemms(_converted(converter, weight), x, out_grad)
    x, weight, out_grad = x.float(), weight.float(), out_grad.float()
    return found, [x @ weight.T, out_grad @ weight, out_grad.T @ x], _lost(converter, x, weight, out_grad)


def _converted(converter: Recipe, weight: torch.Tensor) -> nn.Linear:
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return converter.swap(linear)


def _of_experts(
    converter: Recipe, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, out_grad: torch.Tensor
) -> Results:
    experts, n, k = weight.shape
    layer = GroupedLinear(experts, k, n).to(weight.device, weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    found = _gemms(converter.swap_grouped(layer), x, out_grad, ends)
    exact: list[list[torch.Tensor]] = [[], [], []]
    lost: dict[str, list[dict[str, float]]] = {gemm: [] for gemm in GEMMS}
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for matrix, rows, grads in zip(
        weight.float(), x.float().split(counts), out_grad.float().split(counts), strict=True
    ):
        for results, high in zip(exact, (rows @ matrix.T, grads @ matrix, grads.T @ rows), strict=True):
            results.append(high)
        if len(rows) == 0:
            continue
        padded = [nn.functional.pad(one, (0, 0, 0, -len(one) % 32)) for one in (rows, grads)]  # blocks of mx
        for gemm, fractions in _lost(converter, padded[0], matrix, padded[1]).items():
            lost[gemm].append(fractions)
    means = {
        gemm: {key: sum(one[key] for one in of_gemm) / len(of_gemm) for key in of_gemm[0]}
        for gemm, of_gemm in lost.items()
    }
    return found, [torch.cat(exact[0]), torch.cat(exact[1]), torch.stack(exact[2])], means


def _gemms(
    layer: nn.Linear | GroupedLinear, x: torch.Tensor, out_grad: torch.Tensor, *ends: torch.Tensor
) -> list[torch.Tensor]:
    """Output, input gradient and weight gradient."""
    leaf, weight = x.clone().requires_grad_(), layer.weight
    with torch.enable_grad():
        out = layer(leaf, *ends)
        return [out.detach(), *torch.autograd.grad(out, [leaf, weight], out_grad)]


def _lost(
    converter: Recipe, x: torch.Tensor, weight: torch.Tensor, out_grad: torch.Tensor
) -> dict[str, dict[str, float]]:
    """By GEMM: saturated, flushed."""
    summed_over_columns = {
        "output": (x, weight),
        "grad_input": (out_grad, weight.T),
        "grad_weight": (out_grad.T, x.T),
    }
    result = {}
    for gemm, roles in GEMMS.items():
        saturated, flushed = [], []
        for role, operand in zip(roles, summed_over_columns[gemm], strict=True):
            scaled = converter.scaled(operand, role)
            saturated.append((scaled.exact.abs() > 1.0001 * scaled.largest).float().mean().item())
            flushed.append(((scaled.exact != 0) & (scaled.rounded == 0)).float().mean().item())
        result[gemm] = {"saturated": max(saturated), "flushed": max(flushed)}
    return result
