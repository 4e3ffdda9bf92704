"""Converters with the block-scaled GEMMs of GPUs, computed by definition on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import block_definitions
import tiny  # noqa: F401  registers its models

from torchtitan.converters import CONVERTERS, ConverterEntry, Target
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.recipes import FLOAT8_SECTION, MX_SECTION


def on(capability: tuple[int, int], converter: Callable[[Any, Target], LinearConverter]) -> Any:
    return lambda section, target: converter(
        section, replace(target, device_type="meta", compute_capability=capability)
    )


block_definitions.register()
CONVERTERS.register("mx_of_a_gpu", ConverterEntry("mx", on((10, 0), partial(LinearConverter, MX_SECTION))))
CONVERTERS.register("float8_of_a_gpu", ConverterEntry("float8", on((9, 0), partial(LinearConverter, FLOAT8_SECTION))))
