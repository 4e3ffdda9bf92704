"""Llama in Hugging Face `transformers` and in Meta's releases."""

from typing import Any, Literal

import pydantic

from torchtitan.models.hf_config import CommonConfig, JsonEntries
from torchtitan.models.llama.args import LlamaArgs, scaled
from torchtitan.models.naming import NAMES, ROTARY, HuggingFaceNaming
from torchtitan.models.rope import Positive, Size, Theta


class LlamaConfig(CommonConfig):
    """`config.json` (LlamaConfig)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = LlamaArgs, "llama", "LlamaForCausalLM"

    mlp_bias: Literal[False] = False


class MetaParams(JsonEntries):
    """What is read of Meta's `params.json`."""

    dim: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size | None = None
    multiple_of: Size = 256
    ffn_dim_multiplier: Positive | None = None
    norm_eps: Positive = 1e-5
    rope_theta: Theta = 10000.0
    use_scaled_rope: pydantic.StrictBool = False


def from_params(params: dict[str, Any], vocab_size: int) -> LlamaArgs:
    """The sizes in Meta's `params.json`, or a ValueError. `vocab_size`: rows of the embedding; Llama 2's files say -1.
    The feed-forward width is as in Meta's code (github.com/meta-llama/llama-models, models/llama3/model.py)."""
    read = MetaParams.model_validate(params)
    width = int(2 * 4 * read.dim / 3)
    if read.ffn_dim_multiplier is not None:
        width = int(read.ffn_dim_multiplier * width)
    # params.json does not contain the factor: 32 for Llama 3.2's small models, 8 for Llama 3.1.
    scaling = scaled(32.0 if read.dim < 4096 else 8.0) if read.use_scaled_rope else None
    return LlamaArgs(
        **read.model_dump(include={"dim", "n_layers", "n_heads", "norm_eps", "rope_theta"}),
        n_kv_heads=read.n_kv_heads or read.n_heads,
        ffn_dim=-(-width // read.multiple_of) * read.multiple_of,
        vocab_size=vocab_size,
        rope_scaling=scaling,
    )


LLAMA_NAMING = HuggingFaceNaming(
    NAMES,
    ROTARY,
    LlamaConfig,
    # Old files contain the RoPE table, which is computed here.
    ignored=r".*\.rotary_emb\.inv_freq|rope\.freqs",
    from_params=from_params,
)
