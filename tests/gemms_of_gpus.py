"""Converters with the block-scaled GEMMs of GPUs, whose operators compute their definition on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tiny  # noqa: F401  registers its models

from torchtitan.converters import CONVERTERS, Target
from torchtitan.converters.float8 import Float8Converter
from torchtitan.converters.linear import LinearConverter
from torchtitan.converters.mx import MXConverter
from torchtitan.converters.registry import ConverterEntry


def on(capability: tuple[int, int], converter: Callable[[Any, Target], LinearConverter]) -> Any:
    return lambda section, target: converter(
        section, replace(target, device_type="meta", compute_capability=capability)
    )


CONVERTERS.register("mx_of_a_gpu", ConverterEntry("mx", on((10, 0), MXConverter)))
CONVERTERS.register("float8_of_a_gpu", ConverterEntry("float8", on((9, 0), Float8Converter)))
