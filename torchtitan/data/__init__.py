"""From files or the Hub to batches of tokens: tokenizers, document sources, packing, the resumable loader.

Data sets and tokenizers do not import torch, so errors in them show immediately. The loader's names do, on use.
"""

from typing import TYPE_CHECKING, Any

from torchtitan.data.datasets import DATASETS
from torchtitan.data.sources import Document, Drawn, Source, StreamedSource
from torchtitan.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan.registry import load

if TYPE_CHECKING:
    from torchtitan.data.loader import Batch, Loader, build_loader
    from torchtitan.data.validation import ValidationLoader, build_validation_loader

__all__ = [
    "DATASETS",
    "Batch",
    "Document",
    "Drawn",
    "Loader",
    "Source",
    "StreamedSource",
    "Tokenizer",
    "ValidationLoader",
    "build_loader",
    "build_validation_loader",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(f"torchtitan.data.{'validation' if 'alidation' in name else 'loader'}:{name}")
