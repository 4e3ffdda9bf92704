"""Converters: changes to a model before it is parallelized. `CONVERTERS` is their registry, of what `model.converters`
names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from torchtitan.config.keys import Section
from torchtitan.converters.conversion_report import conversion_report
from torchtitan.converters.converter import Decision, ModelConverter, Target, with_all_hooks
from torchtitan.converters.gemm_check import checked_gemms
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.recipes import FLOAT8_SECTION, INT8_SECTION, MX_SECTION
from torchtitan.registry import Registry

__all__ = [
    "CONVERTERS",
    "ConverterEntry",
    "Decision",
    "LinearConverter",
    "ModelConverter",
    "Target",
    "apply_converters",
    "checked_gemms",
    "conversion_report",
]


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
        section.name: ConverterEntry(section.name, partial(LinearConverter, section))
        for section in (FLOAT8_SECTION, INT8_SECTION, MX_SECTION)
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
