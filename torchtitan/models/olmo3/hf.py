"""OLMo 3 in Hugging Face `transformers`."""

from typing import Any

from torchtitan.models.args import LayerArgs
from torchtitan.models.hf_config import RopeOfKindsConfig, common_config, pattern_entries, rope_of_kinds
from torchtitan.models.naming import LAYER, NAMES, QK_NORMS, ROTARY, HuggingFaceNaming
from torchtitan.models.olmo3.args import Olmo3Args
from torchtitan.models.rope import Positive

NORMS = {
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_feedforward_layernorm.weight",
}


class Olmo3Config(RopeOfKindsConfig):
    """What is read of `config.json`."""

    DEFAULT_THETA = 500000.0

    rms_norm_eps: Positive = 1e-5


def to_config(args: Olmo3Args) -> dict[str, Any]:
    """`config.json` (Olmo3Config). From `rope_theta`, transformers 5 takes the base for one kind of layers only."""
    rope = rope_of_kinds(args, args.rope_theta)
    return common_config(args, "olmo3", "Olmo3ForCausalLM", rope_parameters=rope, **pattern_entries(args))


def from_config(config: dict[str, Any]) -> Olmo3Args:
    """The sizes in a `config.json`. Raises a ValueError if the model is not an OLMo 3 that this project supports."""
    read = Olmo3Config.read(config, "olmo3")
    if read.head_dim not in (None, read.hidden_size // read.num_attention_heads):
        raise ValueError(f"head_dim is {read.head_dim}, but only hidden_size / num_attention_heads is supported")
    args = Olmo3Args(**read.sizes, pattern=read.pattern(LayerArgs(rope_scaled=False), LayerArgs(), full_every=4))
    if read.sliding_theta not in (None, args.rope_theta):
        raise ValueError("RoPE of sliding_attention has another base than that of full_attention")
    return args


OLMO3_NAMING = HuggingFaceNaming(
    names={ours: theirs for ours, theirs in NAMES.items() if not ours.endswith("_norm.weight")} | NORMS | QK_NORMS,
    rotary=ROTARY,
    to_config=to_config,
    from_config=from_config,
)
