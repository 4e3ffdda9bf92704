"""Converters: changes to a model before it is parallelized. `CONVERTERS` is their registry, of what `model.converters`
names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtitan.config.fields import Section
from torchtitan.converters.converter import Decision, ModelConverter, Target, with_all_hooks
from torchtitan.registry import Registry, deferred

__all__ = ["CONVERTERS", "ConverterEntry", "Decision", "ModelConverter", "Target", "apply_converters"]


@dataclass(frozen=True)
class ConverterEntry:
    """A registered converter.

    Attributes:
        section: name of the configuration section passed to `build`; "" passes None.
        build: from (section, target) to the converter. Raises ConfigError if the target cannot run it.
    """

    section: str
    build: Callable[[Any, Target], ModelConverter]


CONVERTERS: Registry[ConverterEntry] = Registry(
    "converter",
    "model.converters",
    {
        "float8": ConverterEntry("float8", deferred("torchtitan.converters.recipes:float8")),
        "int8": ConverterEntry("int8", deferred("torchtitan.converters.recipes:int8")),
        "mx": ConverterEntry("mx", deferred("torchtitan.converters.recipes:mx")),
    },
)


def apply_converters(
    model: nn.Module, names: Iterable[str], section_of: Callable[[str], Section], target: Target
) -> list[ModelConverter]:
    """Builds the converters called `names`, each from its section, and applies them in this order."""
    converters = []
    for name in names:
        entry = CONVERTERS.get(name)
        converter = with_all_hooks(entry.build(section_of(entry.section) if entry.section else None, target), name)
        converter.convert(model)
        converters.append(converter)
    return converters
