"""The registry of converters that `model.converters` names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtitan.config.keys import Section
from torchtitan.converters.converter import ModelConverter, with_all_hooks
from torchtitan.converters.float8 import Float8Converter
from torchtitan.converters.int8 import Int8Converter
from torchtitan.converters.mx import MXConverter
from torchtitan.converters.target import Target
from torchtitan.registry import Registry


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
        "float8": ConverterEntry("float8", Float8Converter),
        "int8": ConverterEntry("int8", Int8Converter),
        "mx": ConverterEntry("mx", MXConverter),
    },
)


def apply_converters(
    model: nn.Module, names: Iterable[str], section_of: Callable[[str], Section], target: Target
) -> list[ModelConverter]:
    """Builds the converters called `names` and applies them in this order.

    Args:
        section_of: from a section's name to its content.
    """
    converters = []
    for name in names:
        entry = CONVERTERS.get(name)
        converter = with_all_hooks(entry.build(section_of(entry.section) if entry.section else None, target), name)
        converter.convert(model)
        converters.append(converter)
    return converters
