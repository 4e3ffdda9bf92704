"""Changes the precision of a built model by changing how its layers compute, and nothing else.

A converter replaces a layer with a subclass that has the same plain parameters. So in two precisions a layer
differs only in its class and its own attributes: its variant. The module, its parameters and its hooks stay, so FSDP,
the optimizer and callers of compiled code keep working with them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from torchtitan.converters.converter import ModelConverter
from torchtitan.errors import ConfigError
from torchtitan.parallel.tensor import choose_all_gathers, set_class

ConvertedModel = tuple[nn.Module, list[ModelConverter]]
"""A full model on the meta device, and the converters applied to it."""


class LayerVariant(NamedTuple):
    """A layer in one precision, without its parameters and hooks.

    Attributes:
        attributes: those that not every module has. They include a recipe's state (such as amax histories), so each
            phase starts with fresh state.
    """

    layer_class: type[nn.Module]
    attributes: dict[str, Any]


LayerVariants = dict[str, LayerVariant]
"""Variants by path, of each layer that some phase converts."""


def layer_variants(models: Sequence[ConvertedModel]) -> list[LayerVariants]:
    """The variants of a model's layers in each phase. Raises a ConfigError if a converter adds or removes modules, or
    adds more to them than attributes."""
    modules = [dict(model.named_modules()) for model, _ in models]
    if different := [fqn for of_phase in modules for fqn in of_phase.keys() ^ modules[0].keys()]:
        raise ConfigError(
            f"[[precision.phase]]: {different[0]} is not in the model in all phases, and modules cannot come and go "
            "once it is built; list the converter that changes this in model.converters, without phases."
        )
    converted = [fqn for fqn in modules[0] if len({type(of_phase[fqn]) for of_phase in modules}) > 1]
    decisions = [decision for _, converters in models for converter in converters for decision in converter.decisions]
    converted = [*dict.fromkeys([*converted, *(decision.fqn for decision in decisions if decision.converted)])]
    for fqn in converted:
        if len({_registered(model.get_submodule(fqn)) for model, _ in models}) > 1:
            raise ConfigError(
                f"[[precision.phase]]: {fqn} does not have the same parameters, buffers and children in all phases, "
                "and they cannot change once the model is built; remove the converter that adds some."
            )
    return [{fqn: _variant_of(model.get_submodule(fqn)) for fqn in converted} for model, _ in models]


def _registered(module: nn.Module) -> tuple[object, ...]:
    """What FSDP, the optimizer and checkpoints know about a layer."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (
        tuple((name, tensor.shape, type(tensor.data)) for name, tensor in tensors),
        tuple(name for name, _ in module.named_children()),
    )


def _variant_of(module: nn.Module) -> LayerVariant:
    of_every_module = vars(nn.Module())
    attributes = {name: value for name, value in vars(module).items() if name not in of_every_module}
    return LayerVariant(type(module), attributes)


def apply_variants(model: nn.Module, old: LayerVariants, new: LayerVariants) -> None:
    """Changes the layers of a built model, or of this rank's part, from their old to their new variants."""
    for fqn, module in model.named_modules():
        if fqn in new:
            _apply(module, old[fqn], new[fqn])
    choose_all_gathers(model)


def _apply(module: nn.Module, old: LayerVariant, new: LayerVariant) -> None:
    set_class(module, new.layer_class)
    for name in old.attributes:
        vars(module).pop(name, None)
    vars(module).update(new.attributes)
