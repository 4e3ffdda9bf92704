"""From one precision to another in a built model: its linear layers change what they compute with, and nothing else.

A converter swaps a linear layer for a subclass with the same plain parameters. So a layer in another precision differs
by its class and attributes alone, its face; the module itself, its parameters and hooks stay, and with them what FSDP,
the optimizer and the compiler's callers hold on to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from torchtitan.converters.linear import LinearConverter
from torchtitan.converters.registry import ModelConverter
from torchtitan.errors import ConfigError
from torchtitan.parallel.tensor import choose_all_gathers, set_class

Converted = tuple[nn.Module, list[ModelConverter]]
"""A whole model on the meta device, and the converters that it has been given to."""


class LayerVariant(NamedTuple):
    """A layer but for its parameters and hooks.

    Attributes:
        kind: its class.
        attributes: other than those of every module; what a recipe keeps from step to step is among them, so it begins
            anew with each phase.
    """

    kind: type[nn.Module]
    attributes: dict[str, Any]


LayerVariants = dict[str, LayerVariant]
"""By path, of the layers that some phase converts."""


def layer_variants(phases: Sequence[Converted]) -> list[LayerVariants]:
    """The faces of one model in each phase.

    Raises:
        ConfigError: a converter is none of linear layers, or gives them more than attributes.
    """
    converted: dict[str, None] = {}
    for _, converters in phases:
        for converter in converters:
            if not isinstance(converter, LinearConverter):
                raise ConfigError(
                    f"[[precision.phase]]: {type(converter).__name__} changes more than linear layers, and only these "
                    "can change in a built model; name it in model.converters, without phases."
                )
            converted.update(dict.fromkeys(decision.fqn for decision in converter.decisions if decision.converted))
    for fqn in converted:
        if len({_registered(model.get_submodule(fqn)) for model, _ in phases}) > 1:
            raise ConfigError(
                f"[[precision.phase]]: {fqn} does not have the same parameters, buffers and children in all phases, "
                "and a built model cannot change them; leave out the converter that adds some."
            )
    return [{fqn: _variant_of(model.get_submodule(fqn)) for fqn in converted} for model, _ in phases]


def _registered(module: nn.Module) -> tuple[Any, ...]:
    """What FSDP, the optimizer and checkpoints know of a layer."""
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
    """Changes the layers of a built model, or those that this rank has, from their old to their new faces."""
    for fqn, module in model.named_modules():
        if fqn in new:
            _apply_variant(module, old[fqn], new[fqn])
    choose_all_gathers(model)


def _apply_variant(module: nn.Module, old: LayerVariant, new: LayerVariant) -> None:
    set_class(module, new.kind)
    for name in old.attributes:
        vars(module).pop(name, None)
    vars(module).update(new.attributes)
