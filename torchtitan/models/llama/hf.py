"""Llama in Hugging Face `transformers` and in Meta's releases."""

from dataclasses import replace
from typing import Any

from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.naming import HuggingFaceNaming
from torchtitan.models.rope import RopeScaling


def to_config(args: LlamaArgs) -> dict[str, Any]:
    """`config.json` of `transformers` (LlamaConfig)."""
    scaling = None
    if rope := args.rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "rope_scaling": scaling,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def from_config(config: dict[str, Any]) -> LlamaArgs:
    """The model sizes in a `config.json`.

    Raises:
        ValueError: the model is not a Llama that this project supports.
    """
    for key, only in (("model_type", "llama"), ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, only) != only:
            raise ValueError(f"{key} is {config[key]!r}, but only {only!r} is supported")
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    if (config.get("head_dim") or dim // heads) * heads != dim:
        raise ValueError(f"head_dim is {config['head_dim']}, but only hidden_size / num_attention_heads is supported")
    # transformers 5 puts everything in rope_parameters.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"RoPE scaling has type {kind!r}, but only 'llama3' is supported")
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            rope["original_max_position_embeddings"],
        )
    return LlamaArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tied_embeddings=config.get("tie_word_embeddings", False),
    )


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


LAYER = "layers.*"
NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    f"{LAYER}.attention.wq.weight": f"model.{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.attention.wk.weight": f"model.{LAYER}.self_attn.k_proj.weight",
    f"{LAYER}.attention.wv.weight": f"model.{LAYER}.self_attn.v_proj.weight",
    f"{LAYER}.attention.wo.weight": f"model.{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.feed_forward.w1.weight": f"model.{LAYER}.mlp.gate_proj.weight",
    f"{LAYER}.feed_forward.w2.weight": f"model.{LAYER}.mlp.down_proj.weight",
    f"{LAYER}.feed_forward.w3.weight": f"model.{LAYER}.mlp.up_proj.weight",
    f"{LAYER}.attention_norm.weight": f"model.{LAYER}.input_layernorm.weight",
    f"{LAYER}.ffn_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
HUGGING_FACE = HuggingFaceNaming(
    names=NAMES,
    rotary=frozenset({f"{LAYER}.attention.wq.weight", f"{LAYER}.attention.wk.weight"}),
    to_config=to_config,
    from_config=from_config,
    # Old files contain the RoPE table, which is computed here.
    ignored=r".*\.rotary_emb\.inv_freq|rope\.freqs",
    from_params=from_params,
)
