"""Models: the registry, and one folder per family."""

from torchtitan.models.registry import MODELS, ModelSpec

__all__ = ["MODELS", "ModelSpec"]
