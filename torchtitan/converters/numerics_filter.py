"""`auto_filter_numerics`: which layers a recipe computes too inaccurately."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.compat.dispatch import unset_fake_temporarily
from torchtitan.converters.filter import AUTO_FILTER_NUMERICS
from torchtitan.converters.numerics import LayerErrors, Recipe, capture_operands, layer_errors
from torchtitan.device import Device
from torchtitan.errors import ConfigError
from torchtitan.models.init import init_weights
from torchtitan.models.moe import GroupedLinear, reset_buffers

MOST_FLUSHED = 0.9  # fraction of an operand's values
MOST_ERROR = 0.4  # of a GEMM's result, relative; no recipe here has more than half of it on ordinary operands
MOST_ERROR_OF_ALL = 0.07  # of the output layer's input gradient, which reaches all layers; 8 bits: 0.03, nvfp4: 0.11
TOKENS = 256
BYTES = 8  # per parameter: weights and gradients in bfloat16, and room for the largest layer in float32


def inaccurate_layers(converter: Recipe, model: nn.Module, layers: Sequence[str]) -> dict[str, str]:
    """The layers that the recipe does not suit, and why: more than `MOST_FLUSHED` of an operand becomes 0, or a GEMM's
    relative error is more than `MOST_ERROR`, or `MOST_ERROR_OF_ALL`. (At the start of training values that become 0 are
    still harmless: large gradients of few logits hide the small ones of all others.)

    The operands are those of one forward and backward pass on random tokens. A model on the meta device gets initial
    weights from a fixed seed. So the choice depends on the sizes and the recipe alone, and a resumed run makes the
    same. One rank measures and broadcasts.

    Raises:
        ConfigError: the model does not fit on one device.
    """
    planned = converter.target.device_type == "meta"  # its other ranks are not there
    distributed = dist.is_initialized() and dist.get_world_size() > 1 and not planned
    found: list[dict[str, str] | ConfigError] = [{}]
    if not distributed or dist.get_rank() == 0:
        try:
            with unset_fake_temporarily():  # in a plan
                found[0] = _measure(converter.emulated() if planned else converter, model, layers)
        except ConfigError as error:
            found[0] = error
    if distributed:
        dist.broadcast_object_list(found)
    if isinstance(found[0], ConfigError):
        raise found[0]
    return found[0]


def _measure(converter: Recipe, model: nn.Module, layers: Sequence[str]) -> dict[str, str]:
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


def _unsuited(fqn: str, known: Any, layer: LayerErrors) -> str | None:
    in_block = any(part.isdecimal() for part in fqn.split("."))
    for gemm, errors in layer.items():
        if getattr(known, gemm) is not None and errors["flushed"] > MOST_FLUSHED:
            return f"{errors['flushed']:.1%} of an operand of {gemm} would be 0"
        most = MOST_ERROR_OF_ALL if gemm == "grad_input" and not in_block else MOST_ERROR
        if not errors["relative_error"] <= most:  # NaN neither
            return f"{gemm} would have an error of {errors['relative_error']:.1%}, more than {most:.0%}"
    return None


def _with_weights(converter: Recipe, model: nn.Module) -> Any:
    """A copy of the model in bfloat16, on the device it is for."""
    cuda = converter.target.device_type == "cuda"
    device = Device("cuda", "", torch.device("cuda")) if cuda else Device("cpu", "", torch.device("cpu"))
    needed = BYTES * sum(parameter.numel() for parameter in model.parameters())
    if needed > device.memory_capacity_bytes():
        raise ConfigError(
            f"{converter.name}.filter_fqns: {AUTO_FILTER_NUMERICS} runs the full model on one device, which takes "
            f"about {needed / 2**30:.0f} GiB; list the layers that scripts/numerics_report.py proposes, perhaps in "
            "a model with fewer layers."
        )
    copied: Any = copy.deepcopy(model)
    if all(parameter.device.type != "meta" for parameter in model.parameters()):
        return copied.to(device.torch_device, torch.bfloat16)
    for module in copied.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device.torch_device)
            setattr(module, name, nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device.torch_device))
    init_weights(copied, copied.init_std, seed=0)
    reset_buffers(copied)
    return copied
