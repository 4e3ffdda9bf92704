"""Llama weights under the names and in the layout of Hugging Face `transformers`."""

import re

import torch

from torchtitan.models.llama.args import LlamaArgs

_TO_HF = {
    "tok_embeddings": "model.embed_tokens",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
}


def hf_name(name: str) -> str:
    """'layers.0.attention.wq.weight' to 'model.layers.0.self_attn.q_proj.weight'."""
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name):
        return f"model.layers.{match[1]}.{_TO_HF[match[2]]}.weight"
    return f"{_TO_HF[name.removesuffix('.weight')]}.weight"


def to_hf(state_dict: dict[str, torch.Tensor], args: LlamaArgs) -> dict[str, torch.Tensor]:
    """Our weights as `transformers` has them.

    There a rotation pairs channel i with i + head_dim / 2, here 2i with 2i + 1 (Meta's layout), so the rows of wq and
    wk change places within each head.
    """
    return {hf_name(name): _split_halves(weight, name, args) for name, weight in state_dict.items()}


def from_hf(state_dict: dict[str, torch.Tensor], names: list[str], args: LlamaArgs) -> dict[str, torch.Tensor]:
    """The weights called `names` here, out of a `transformers` state dict. The inverse of `to_hf`."""
    return {name: _interleave(state_dict[hf_name(name)], name, args) for name in names}


def _split_halves(weight: torch.Tensor, name: str, args: LlamaArgs) -> torch.Tensor:
    if not name.endswith(("wq.weight", "wk.weight")):
        return weight
    return weight.unflatten(0, (-1, args.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _interleave(weight: torch.Tensor, name: str, args: LlamaArgs) -> torch.Tensor:
    if not name.endswith(("wq.weight", "wk.weight")):
        return weight
    return weight.unflatten(0, (-1, 2, args.head_dim // 2)).transpose(1, 2).flatten(0, 2)
