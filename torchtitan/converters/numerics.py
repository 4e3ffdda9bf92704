"""Errors of a layer's three GEMMs in a recipe, on operands captured in training: M tokens, K inputs, N outputs; and
`auto_filter_numerics`: which layers a recipe computes too inaccurately."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchtitan.compat.dispatch import unset_fake_temporarily
from torchtitan.converters.converter import Decision, Target
from torchtitan.converters.filter import AUTO_FILTER_NUMERICS
from torchtitan.device import Device
from torchtitan.errors import ConfigError
from torchtitan.kernels.grouped_gemm import rows_of
from torchtitan.models.init import init_weights
from torchtitan.models.moe import GroupedLinear, reset_buffers
from torchtitan.parallel.object_collectives import from_rank_0

T = TypeVar("T")
OperandRole = Literal["x", "weight", "grad_output"]

# The operands of each GEMM. Each sums over a different dimension of them.
GEMMS: dict[str, tuple[OperandRole, OperandRole]] = {
    "output": ("x", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "x"),
}
Operands = Sequence[torch.Tensor]
"""(input, weight, out_grad) of a linear layer, (M, K), (N, K), (M, N); of a layer of experts (input, weight, ends of
their rows, out_grad), where the weight is (experts, N, K)."""


class LayerConverter(Protocol):
    """The part of `LinearConverter` that this module and `measured_filter.py` use."""

    name: str
    target: Target
    decisions: list[Decision]
    gemms: Any
    grouped_gemms: Any

    @property
    def description(self) -> str: ...

    def emulated(self) -> "LayerConverter": ...

    def low_precision(self, layer: Any) -> Any: ...

    def scaled(self, tensor: torch.Tensor, role: OperandRole) -> Any: ...


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


def layer_errors(converter: LayerConverter, operands: Operands) -> dict[str, dict[str, float]]:
    """The GEMMs in the recipe compared with float32. Converts a copy of the layer.

    Returns:
        By GEMM:
            sqnr_db: signal-to-quantization-noise ratio.
            relative_error: 2-norm of the difference over 2-norm of the exact result.
            cosine: between the result and the exact one.
            saturated, flushed: fractions of operand values that exceed the format's range and that become 0; the larger
                of the two operands', for experts their mean.
    """
    x, weight, *ends, out_grad = operands
    known = converter.grouped_gemms if ends else converter.gemms
    rounded = gemms_of(converter.low_precision(layer_with(weight)), x, out_grad, *ends)
    x, weight, out_grad = x.float(), weight.float(), out_grad.float()
    exact = gemms_of(layer_with(weight), x, out_grad, *ends)
    lost = _lost(converter, x, weight, out_grad, *ends)
    errors = {}
    for gemm, low, high in zip(GEMMS, rounded, exact, strict=True):
        if getattr(known, gemm) is None:  # nothing is rounded
            lost[gemm] = dict.fromkeys(lost[gemm], 0.0)
        low = low.float()
        noise, signal = (low - high).norm(), high.norm()
        errors[gemm] = {
            "sqnr_db": float(20 * torch.log10(signal / noise)) if noise > 0 else float("inf"),
            "relative_error": float(noise / signal) if signal > 0 else 0.0,
            "cosine": float(F.cosine_similarity(low.flatten(), high.flatten(), dim=0)),
            **lost[gemm],
        }
    return errors


def layer_with(weight: torch.Tensor) -> nn.Linear | GroupedLinear:
    """A layer with this weight, (N, K), or of experts, (experts, N, K)."""
    *experts, n, k = weight.shape
    with torch.device("meta"):
        layer = GroupedLinear(experts[0], k, n) if experts else nn.Linear(k, n, bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def gemms_of(layer: Any, x: torch.Tensor, out_grad: torch.Tensor, *ends: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and weight gradient."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        out = layer(x, *ends)
        return [out.detach(), *torch.autograd.grad(out, [x, layer.weight], out_grad)]


def _lost(
    converter: LayerConverter, x: torch.Tensor, weight: torch.Tensor, out_grad: torch.Tensor, *ends: torch.Tensor
) -> dict[str, dict[str, float]]:
    """By GEMM: saturated, flushed; of experts, the means of those that have rows."""
    if not ends:
        return _lost_of_matrix(converter, x, weight, out_grad)
    of_experts = []
    for rows, matrix in zip(rows_of(ends[0]), weight, strict=True):
        if rows.start < rows.stop:
            filled_up = (0, 0, 0, (rows.start - rows.stop) % 32)  # for blocks of mx
            operands = F.pad(x[rows], filled_up), matrix, F.pad(out_grad[rows], filled_up)
            of_experts.append(_lost_of_matrix(converter, *operands))
    return {
        gemm: {key: sum(lost[gemm][key] for lost in of_experts) / len(of_experts) for key in fractions}
        for gemm, fractions in of_experts[0].items()
    }


def _lost_of_matrix(
    converter: LayerConverter, x: torch.Tensor, weight: torch.Tensor, out_grad: torch.Tensor
) -> dict[str, dict[str, float]]:
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


MOST_FLUSHED = 0.9  # fraction of an operand's values
MOST_ERROR = 0.4  # relative error of a GEMM's result; no recipe here has more than half of it on ordinary operands
# Relative error of the output layer's input gradient, which reaches all layers; 8 bits: 0.03, nvfp4: 0.11.
MOST_ERROR_OF_ALL = 0.07
TOKENS = 256
BYTES_PER_PARAMETER = 8  # per parameter: weights and gradients in bfloat16, and room for the largest layer in float32


def inaccurate_layers(converter: LayerConverter, model: nn.Module, layers: Sequence[str]) -> dict[str, str]:
    """The layers that the recipe does not suit, and why: more than `MOST_FLUSHED` of an operand becomes 0, or a GEMM's
    relative error is more than `MOST_ERROR`, or `MOST_ERROR_OF_ALL`. (At the start of training values that become 0 are
    still harmless: large gradients of few logits hide the small ones of all others.)

    The operands come from one forward and backward pass on random tokens. A model on the meta device gets initial
    weights from a fixed seed. So the choice depends on the sizes and the recipe alone, and a resumed run makes the
    same.

    Raises:
        ConfigError: the model does not fit on one device.
    """

    def measure() -> dict[str, str]:
        planned = converter.target.device_type == "meta"
        with unset_fake_temporarily():  # in a plan
            return _measure(converter.emulated() if planned else converter, model, layers)

    return of_rank_0(converter.target, measure)


def of_rank_0(target: Target, measure: Callable[[], T]) -> T:
    """`measure()`; in a run, rank 0 measures for all, so that they decide the same. (A plan has only one rank.) A
    ConfigError is raised on every rank."""
    distributed = dist.is_initialized() and dist.get_world_size() > 1 and target.device_type != "meta"
    return from_rank_0(measure) if distributed else measure()


def _measure(converter: LayerConverter, model: nn.Module, layers: Sequence[str]) -> dict[str, str]:
    if not hasattr(model, "tok_embeddings"):
        raise ConfigError(
            f"{converter.name}.filter_fqns: {AUTO_FILTER_NUMERICS} runs the model on tokens, but "
            f"{type(model).__name__} has no embedding named tok_embeddings; list the layers instead."
        )
    copied = _with_weights(converter, model)
    operands: dict[str, list[torch.Tensor]] = {}
    capture_operands(copied, operands)
    embedding: torch.Tensor = copied.tok_embeddings.weight
    tokens = torch.randint(len(embedding), (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(embedding.device)
    with torch.enable_grad():
        copied(tokens[:, :-1], tokens[:, 1:]).backward()
    against = {}
    for fqn in layers:
        experts = isinstance(model.get_submodule(fqn), GroupedLinear)
        known = converter.grouped_gemms if experts else converter.gemms
        reason = _unsuited(fqn, known, layer_errors(converter, operands[fqn]))
        if reason:
            against[fqn] = reason
    return against


def _unsuited(fqn: str, known: Any, layer: Mapping[str, Mapping[str, float]]) -> str | None:
    in_block = any(component.isdecimal() for component in fqn.split("."))
    for gemm, errors in layer.items():
        if getattr(known, gemm) is not None and errors["flushed"] > MOST_FLUSHED:
            return f"{errors['flushed']:.1%} of an operand of {gemm} would be 0"
        most = MOST_ERROR_OF_ALL if gemm == "grad_input" and not in_block else MOST_ERROR
        if not errors["relative_error"] <= most:  # NaN neither
            return f"{gemm} would have an error of {errors['relative_error']:.1%}, more than {most:.0%}"
    return None


def _with_weights(converter: LayerConverter, model: nn.Module) -> Any:
    """A copy of the model in bfloat16, on the device it is for."""
    cuda = converter.target.device_type == "cuda"
    device = Device("cuda", "", torch.device("cuda")) if cuda else Device("cpu", "", torch.device("cpu"))
    needed = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in model.parameters())
    if needed > device.memory_capacity_bytes():
        raise ConfigError(
            f"{converter.name}.filter_fqns: {AUTO_FILTER_NUMERICS} runs the full model on one device, which takes "
            f"about {needed / 2**30:.0f} GiB; list the layers that scripts/numerics_report.py proposes, perhaps in "
            "a model with fewer layers."
        )
    copied: Any = copy.deepcopy(model)
    if all(parameter.device.type != "meta" for parameter in model.parameters()):
        return copied.to(device.torch_device, torch.bfloat16)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16()
    copied.to_empty(device=device.torch_device)
    init_weights(copied, copied.init_std, seed=0)
    reset_buffers(copied)
    return copied
