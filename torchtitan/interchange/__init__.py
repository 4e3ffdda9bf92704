"""Importing and exporting weights: folders of Hugging Face `transformers` and of Meta's releases."""

from torchtitan.interchange.exchange import Exchange
from torchtitan.interchange.model import PublishedModel, published

__all__ = ["Exchange", "PublishedModel", "published"]
