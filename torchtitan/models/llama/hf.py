"""Llama in Hugging Face `transformers` and in Meta's releases."""

from dataclasses import replace
from typing import Any

from torchtitan.models.hf_config import common_config, common_sizes, rope_scaling_of
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.naming import NAMES, ROTARY, HuggingFaceNaming
from torchtitan.models.rope import RopeScaling


def to_config(args: LlamaArgs) -> dict[str, Any]:
    """`config.json` of `transformers` (LlamaConfig)."""
    config = common_config(args, "llama", "LlamaForCausalLM") | {"mlp_bias": False}
    if rope := args.rope_scaling:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_seq_len,
        }
    return config


def from_config(config: dict[str, Any]) -> LlamaArgs:
    """The model sizes in a `config.json`.

    Raises:
        ValueError: the model is not a Llama that this project supports.
    """
    args = LlamaArgs(**common_sizes(config, "llama", mlp_bias=False))
    if (config.get("head_dim") or args.head_dim) * args.n_heads != args.dim:
        raise ValueError(f"head_dim is {config['head_dim']}, but only hidden_size / num_attention_heads is supported")
    if rope := rope_scaling_of(config, "llama3"):
        scaling = RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            rope["original_max_position_embeddings"],
        )
        args = replace(args, rope_scaling=scaling)
    return args


def from_params(params: dict[str, Any], vocab_size: int) -> LlamaArgs:
    """The model sizes in Meta's `params.json`. The feed-forward width is computed from three of its numbers, as in
    Meta's code (github.com/meta-llama/llama-models, models/llama3/model.py).

    Args:
        vocab_size: rows of the embedding; Llama 2's files say -1.
    """
    width = int(2 * 4 * params["dim"] / 3)
    if params.get("ffn_dim_multiplier") is not None:
        width = int(params["ffn_dim_multiplier"] * width)
    multiple = params.get("multiple_of", 256)
    heads = params["n_heads"]
    args = LlamaArgs(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=heads,
        n_kv_heads=params.get("n_kv_heads") or heads,
        ffn_dim=multiple * ((width + multiple - 1) // multiple),
        vocab_size=vocab_size,
        norm_eps=params.get("norm_eps", 1e-5),
        rope_theta=float(params.get("rope_theta", 10000.0)),
    )
    if params.get("use_scaled_rope"):
        # params.json does not contain the factor: 32 for Llama 3.2's small models, 8 for Llama 3.1.
        args = replace(args, rope_scaling=RopeScaling(factor=32.0 if args.dim < 4096 else 8.0))
    return args


HUGGING_FACE = HuggingFaceNaming(
    names=NAMES,
    rotary=ROTARY,
    to_config=to_config,
    from_config=from_config,
    # Old files contain the RoPE table, which is computed here.
    ignored=r".*\.rotary_emb\.inv_freq|rope\.freqs",
    from_params=from_params,
)
