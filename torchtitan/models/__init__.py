"""Models: the registry, and a folder for each family."""

from torchtitan.models.registry import MODELS, ModelSpec

__all__ = ["MODELS", "ModelSpec"]
