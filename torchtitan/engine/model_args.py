"""Sizes of the configured model."""

import math
from dataclasses import replace
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.extension import import_user_module
from torchtitan.config.training import Model
from torchtitan.data.tokenizer import load_tokenizer
from torchtitan.errors import ConfigError
from torchtitan.models import MODELS
from torchtitan.models.registry import AUTO
from torchtitan.models.rope import ROPE, read_scaling
from torchtitan.protocols import ModelArgs
from torchtitan.registry import load

GROW_WITH_WIDTH = ("n_heads", "n_kv_heads", "ffn_dim")


def register_models(config: JobConfig) -> None:
    """Imports the user's module. With `model.flavor = "auto"`, also makes a flavor of the sizes of the model in
    `checkpoint.initial_load_path`. Call it before anything asks for sizes. Raises a UserError if there is no such
    module, or the path says no sizes of this family."""
    if config.experimental.custom_import:
        import_user_module(config.experimental.custom_import, "experimental.custom_import")
    if config.model.flavor == AUTO:
        spec = MODELS.get(config.model.name)
        flavors = {**spec.flavors, AUTO: load("torchtitan.tools.interchange.convert:sizes_from_files")(config, spec)}
        MODELS.replace(config.model.name, replace(spec, flavors=flavors))


def sizes_of(model: Model) -> ModelArgs:
    """Sizes of the flavor, with `model.dim`, `model.n_layers` and RoPE's keys in place of its own. Raises a ConfigError
    if there is no such model or flavor, or it does not come in this width, or its RoPE cannot be scaled like this."""
    args = MODELS.get(model.name).flavor(model.flavor)
    if model.dim is not None and model.dim != args.dim:
        args = with_width(args, model.dim)
    if model.n_layers is not None:
        args = replace(args, n_layers=model.n_layers)
    rope = rope_keys(model)
    try:
        return replace(args, **{key: read_scaling(value) for key, value in rope.items()})
    except ValueError as error:
        raise ConfigError(f"model.rope_scaling: {error}.") from None
    except TypeError:
        raise ConfigError(f"model.{min(rope)}: the sizes of {model.name} have no such field; unset it.") from None


def rope_keys(model: Model) -> dict[str, Any]:
    """The keys of RoPE that are set. Sizes of a model have fields of the same names."""
    return {key: getattr(model, key) for key in sorted(ROPE) if getattr(model, key) is not None}


def width_unit(args: ModelArgs) -> int:
    """The widths that `with_width` takes are the multiples of this."""
    return args.dim // math.gcd(args.dim, *(getattr(args, name) for name in GROW_WITH_WIDTH))


def with_width(args: ModelArgs, dim: int) -> ModelArgs:
    """The sizes at another width: as many channels in a head, and heads and feed-forward in the same ratio to it.
    Raises a ConfigError if these would not be whole numbers, or the model has experts."""
    if args.moe is not None or not all(hasattr(args, name) for name in GROW_WITH_WIDTH):
        raise ConfigError("model.dim: only dense models can have another width than their flavor; unset it.")
    if dim % width_unit(args):
        raise ConfigError(
            f"model.dim = {dim}: heads and feed-forward of this flavor are whole at multiples of {width_unit(args)}; "
            "use one of them."
        )
    return replace(args, dim=dim, **{name: getattr(args, name) * dim // args.dim for name in GROW_WITH_WIDTH})


def find_model_args(model: Model, vocab_size: int | None = None) -> ModelArgs:
    """Sizes of the model; the vocabulary size is the tokenizer's if the flavor does not set it. `vocab_size`: the
    tokenizer's; if None, it is read if the flavor needs it. Raises a ConfigError if there is no such model or flavor,
    or the tokenizer has too many tokens for it; a DataError if the tokenizer is needed and cannot be used."""
    args = sizes_of(model)
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
    """Sizes of muP's base model, with the vocabulary and tying of the model itself (`args`)."""
    base = MODELS.get(model.name).flavor(model.mup_base_flavor, "model.mup_base_flavor")
    return replace(base, vocab_size=args.vocab_size, tied_embeddings=args.tied_embeddings)
