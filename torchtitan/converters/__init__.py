"""Converters: changes to a model before it is divided over devices. `CONVERTERS` is their registry."""

from torchtitan.converters.conversion_report import conversion_report
from torchtitan.converters.filter import Decision
from torchtitan.converters.gemm_check import checked_products
from torchtitan.converters.linear import LinearConverter
from torchtitan.converters.registry import CONVERTERS, ConverterEntry, ModelConverter, apply_converters
from torchtitan.converters.switch import Faces, faces_of, switch
from torchtitan.converters.target import Target

__all__ = [
    "CONVERTERS",
    "ConverterEntry",
    "Decision",
    "Faces",
    "LinearConverter",
    "ModelConverter",
    "Target",
    "apply_converters",
    "checked_products",
    "conversion_report",
    "faces_of",
    "switch",
]
