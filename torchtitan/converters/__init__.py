"""Converters: changes to a model before it is parallelized. `CONVERTERS` is their registry."""

from torchtitan.converters.conversion_report import conversion_report
from torchtitan.converters.converter import ModelConverter
from torchtitan.converters.filter import Decision
from torchtitan.converters.gemm_check import checked_gemms
from torchtitan.converters.linear import LinearConverter
from torchtitan.converters.registry import CONVERTERS, ConverterEntry, apply_converters
from torchtitan.converters.switch import LayerVariants, apply_variants, layer_variants
from torchtitan.converters.target import Target

__all__ = [
    "CONVERTERS",
    "ConverterEntry",
    "Decision",
    "LayerVariants",
    "LinearConverter",
    "ModelConverter",
    "Target",
    "apply_converters",
    "apply_variants",
    "checked_gemms",
    "conversion_report",
    "layer_variants",
]
