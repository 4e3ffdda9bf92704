"""Gemma 3 in Hugging Face `transformers`: its decoder of text."""

from typing import Any, Literal

from torchtitan.models.args import LayerArgs
from torchtitan.models.gemma3.args import Gemma3Args
from torchtitan.models.hf_config import RopeOfKindsConfig, common_config, pattern_entries, rope_of_kinds
from torchtitan.models.naming import LAYER, NAMES, QK_NORMS, ROTARY, HuggingFaceNaming
from torchtitan.models.rope import Positive, Size, Theta

MORE = {
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_norm.weight": f"model.{LAYER}.pre_feedforward_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_feedforward_layernorm.weight",
}
Gelu = Literal["gelu_pytorch_tanh"]
GELU: Gelu = "gelu_pytorch_tanh"
LOCAL_THETA = 10000.0


class Gemma3Config(RopeOfKindsConfig):
    """What is read of `config.json`."""

    DEFAULT_THETA = 1000000.0

    tie_word_embeddings: bool = True
    hidden_act: Gelu = GELU  # type: ignore[assignment]
    hidden_activation: Gelu = GELU
    query_pre_attn_scalar: Positive = 256
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 6
    rope_local_base_freq: Theta = LOCAL_THETA
    attn_logit_softcapping: Literal[None] = None
    final_logit_softcapping: Literal[None] = None
    use_bidirectional_attention: Literal[False] = False


def to_config(args: Gemma3Args) -> dict[str, Any]:
    """`config.json` (Gemma3TextConfig). Raises a ValueError if layers with a window have several bases of RoPE."""
    layers = [args.layer(number) for number in range(args.n_layers)]
    local = {layer.rope_theta or args.rope_theta for layer in layers if layer.window is not None} or {LOCAL_THETA}
    if len(local) > 1:
        raise ValueError(f"the published format has one base of RoPE for layers with a window, not {sorted(local)}")
    rope = rope_of_kinds(args, *local)
    more = pattern_entries(args) | {"query_pre_attn_scalar": args.query_pre_attn_scalar, "hidden_activation": GELU}
    return common_config(args, "gemma3_text", "Gemma3ForCausalLM", hidden_act=GELU, rope_parameters=rope, **more)


def from_config(config: dict[str, Any]) -> Gemma3Args:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a Gemma 3 that this project supports."""
    read = Gemma3Config.read(config, "gemma3_text")
    theta = read.sliding_theta or read.rope_local_base_freq
    pattern = read.pattern(LayerArgs(rope_theta=theta, rope_scaled=False), LayerArgs(), read.sliding_window_pattern)
    scalar, head_dim = read.query_pre_attn_scalar, read.head_dim or 256
    return Gemma3Args(**read.sizes, head_dim=head_dim, query_pre_attn_scalar=scalar, pattern=pattern)


GEMMA3_NAMING = HuggingFaceNaming(
    names=NAMES | QK_NORMS | MORE, rotary=ROTARY, to_config=to_config, from_config=from_config
)
