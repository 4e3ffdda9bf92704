"""Sizes of the configured model."""

from torchtitan.config.training import Model
from torchtitan.data.tokenizer import load_tokenizer
from torchtitan.models import MODELS
from torchtitan.protocols import ModelArgs


def find_model_args(model: Model) -> ModelArgs:
    """Sizes of the flavor; the vocabulary size is the tokenizer's if the flavor does not set it.

    Raises:
        ConfigError: there is no such model or flavor.
        DataError: the tokenizer is needed and cannot be used.
    """
    args = MODELS.get(model.name).flavor(model.flavor)
    return (
        args if args.vocab_size is not None else args.with_vocab_size(load_tokenizer(model.tokenizer_path).vocab_size)
    )
