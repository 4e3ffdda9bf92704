"""Sizes of the configured model."""

from dataclasses import replace

from torchtitan.config.training import Model
from torchtitan.data.tokenizer import load_tokenizer
from torchtitan.errors import ConfigError
from torchtitan.models import MODELS
from torchtitan.protocols import ModelArgs


def find_model_args(model: Model, vocab_size: int | None = None) -> ModelArgs:
    """Sizes of the flavor; the vocabulary size is the tokenizer's if the flavor does not set it.

    Args:
        vocab_size: the tokenizer's. If None, the tokenizer is read if the flavor needs it.

    Raises:
        ConfigError: there is no such model or flavor, or the tokenizer has too many tokens for it.
        DataError: the tokenizer is needed and cannot be used.
    """
    args = MODELS.get(model.name).flavor(model.flavor)
    if vocab_size is None:
        if args.vocab_size is not None:
            return args
        vocab_size = load_tokenizer(model.tokenizer_path).vocab_size
    args = args.with_vocab_size(vocab_size)
    assert args.vocab_size is not None
    if vocab_size > args.vocab_size:
        raise ConfigError(
            f"model.tokenizer_path: the tokenizer has {vocab_size} tokens, but {model.name} {model.flavor} has a "
            f"vocabulary of {args.vocab_size}; use the tokenizer of this model."
        )
    return args


def describe_parametrization(model: Model) -> str:
    """In the identity of a checkpoint."""
    return model.parametrization if model.parametrization == "standard" else f"mup with base {model.mup_base_flavor}"


def find_base_args(model: Model, args: ModelArgs) -> ModelArgs:
    """Sizes of muP's base model, with the vocabulary and tying of the model itself.

    Args:
        args: sizes of the model.

    Raises:
        ConfigError: there is no such flavor.
    """
    base = MODELS.get(model.name).flavor(model.mup_base_flavor, "model.mup_base_flavor")
    return replace(base, vocab_size=args.vocab_size, tied_embeddings=args.tied_embeddings)
