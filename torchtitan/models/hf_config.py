"""What the `config.json` files of all families have in common (Hugging Face `transformers`)."""

from typing import Any

from torchtitan.models.args import TransformerArgs


class WrongModelType(ValueError):
    """The file describes a model of another family."""


def common_config(args: TransformerArgs, model_type: str, architecture: str) -> dict[str, Any]:
    """The entries that every family writes.

    Args:
        architecture: class in `transformers`.
    """
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
    }


def common_sizes(config: dict[str, Any], model_type: str, **only: Any) -> dict[str, Any]:
    """Keyword arguments for `TransformerArgs`, except `rope_scaling`; the inverse of `common_config`.

    Args:
        model_type: of the family.
        only: entries that have this value or are missing, since nothing else is supported.

    Raises:
        ValueError: an entry has another value (`WrongModelType` if it is the model type).
        KeyError: an entry is missing.
    """
    if config.get("model_type", model_type) != model_type:
        raise WrongModelType(f"model_type is {config['model_type']!r}, not {model_type!r}")
    for key, value in {"hidden_act": "silu", "attention_bias": False, **only}.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}, but only {value!r} is supported")
    heads = config["num_attention_heads"]
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_dim": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(config.get("rope_theta") or _rope(config).get("rope_theta") or 10000.0),
        "tied_embeddings": config.get("tie_word_embeddings", False),
    }


def rope_scaling_of(config: dict[str, Any], *supported: str) -> dict[str, Any] | None:
    """The entries of RoPE scaling; None without scaling.

    Args:
        supported: types of scaling.

    Raises:
        ValueError: the type is another one.
    """
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in supported:
        only = f"only {' or '.join(map(repr, supported))} is" if supported else "no scaling is"
        raise ValueError(f"RoPE scaling has type {kind!r}, but {only} supported")
    return rope


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 puts everything in rope_parameters.
    found: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found
