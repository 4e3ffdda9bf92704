"""OLMo 3 in Hugging Face `transformers`."""

from typing import Any

import pydantic

from torchtitan.models.args import LayerArgs
from torchtitan.models.hf_config import (
    FULL,
    SLIDING,
    PatternedConfig,
    Rope,
    common_config,
    pattern_entries,
    published_scaling,
)
from torchtitan.models.naming import LAYER, NAMES, QK_NORMS, ROTARY, HuggingFaceNaming
from torchtitan.models.olmo3.args import Olmo3Args
from torchtitan.models.rope import Positive

NORMS = {
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_feedforward_layernorm.weight",
}


class Olmo3Config(PatternedConfig):
    """What is read of `config.json`. Transformers 5 writes `rope_parameters` for each kind of layer; `sliding_rope` is
    that of layers with a window."""

    DEFAULT_THETA = 500000.0

    rms_norm_eps: Positive = 1e-5
    sliding_rope: Rope | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rope_of_kinds(cls, values: Any) -> Any:
        rope = values.get("rope_parameters") if isinstance(values, dict) else None
        if isinstance(rope, dict) and (FULL in rope or SLIDING in rope):
            values = {**values, "rope_parameters": rope.get(FULL), "sliding_rope": rope.get(SLIDING)}
        return values


def to_config(args: Olmo3Args) -> dict[str, Any]:
    """`config.json` (Olmo3Config). From `rope_theta`, transformers 5 takes the base for one kind of layers only."""
    local = {"rope_type": "default", "rope_theta": args.rope_theta}
    rope = {FULL: local | (published_scaling(args.rope_scaling) or {}), SLIDING: local}
    return common_config(args, "olmo3", "Olmo3ForCausalLM", rope_parameters=rope, **pattern_entries(args))


def from_config(config: dict[str, Any]) -> Olmo3Args:
    """The sizes in a `config.json`. Raises a ValueError if the model is not an OLMo 3 that this project supports."""
    read = Olmo3Config.read(config, "olmo3")
    if read.head_dim not in (None, read.hidden_size // read.num_attention_heads):
        raise ValueError(f"head_dim is {read.head_dim}, but only hidden_size / num_attention_heads is supported")
    args = Olmo3Args(**read.sizes, pattern=read.pattern(LayerArgs(rope_scaled=False), LayerArgs(), full_every=4))
    local = read.sliding_rope or Rope()
    kind = (local.model_extra or {}).get("rope_type", "default")
    if kind != "default" or local.rope_theta not in (None, args.rope_theta):
        raise ValueError("RoPE of sliding_attention is scaled, or has another base than that of full_attention")
    return args


OLMO3_NAMING = HuggingFaceNaming(
    names={ours: theirs for ours, theirs in NAMES.items() if not ours.endswith("_norm.weight")} | NORMS | QK_NORMS,
    rotary=ROTARY,
    to_config=to_config,
    from_config=from_config,
)
