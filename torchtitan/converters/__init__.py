"""Converters: changes to a model before it is divided over devices. `CONVERTERS` is their registry."""

from torchtitan.converters.registry import CONVERTERS, ConverterEntry, ModelConverter, Target, apply_converters

__all__ = ["CONVERTERS", "ConverterEntry", "ModelConverter", "Target", "apply_converters"]
