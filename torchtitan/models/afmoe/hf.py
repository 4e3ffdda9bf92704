"""Trinity in Hugging Face `transformers`."""

from typing import Any, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.afmoe.args import AfmoeArgs
from torchtitan.models.args import LayerArgs
from torchtitan.models.hf_config import PatternedConfig, common_config, moe_entries, pattern_entries, read_moe
from torchtitan.models.naming import EXPERT_BIAS, LAYER, NORMALIZED_SPARSE, ROTARY, ROUTER, HuggingFaceNaming
from torchtitan.models.rope import Positive, Size

MORE = {
    f"{LAYER}.attention.wg.weight": f"model.{LAYER}.self_attn.gate_proj.weight",
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_norm.weight": f"model.{LAYER}.pre_mlp_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_mlp_layernorm.weight",
    ROUTER: f"model.{LAYER}.mlp.router.gate.weight",
    EXPERT_BIAS: f"model.{LAYER}.mlp.expert_bias",
}
MOE = {
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "ffn_dim": "moe_intermediate_size",
    "n_shared_experts": "num_shared_experts",
    "n_dense_layers": "num_dense_layers",
    "scale": "route_scale",
}
FIXED = {"route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1}


class AfmoeConfig(PatternedConfig):
    """What is read of `config.json`."""

    rms_norm_eps: Positive = 1e-5
    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    num_shared_experts: NonNegativeInt = 2
    num_dense_layers: NonNegativeInt = 1
    route_scale: Positive = 1.0
    route_norm: Literal[True] = True
    score_func: Literal["sigmoid"] = "sigmoid"
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    mup_enabled: pydantic.StrictBool = False
    global_attn_every_n_layers: Size = 4


def to_config(args: AfmoeArgs) -> dict[str, Any]:
    """`config.json` (AfmoeConfig)."""
    more = FIXED | moe_entries(args.moe, MOE) | pattern_entries(args) | {"mup_enabled": args.scaled_embeddings}
    return common_config(args, "afmoe", "AfmoeForCausalLM", **more)


def from_config(config: dict[str, Any]) -> AfmoeArgs:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a Trinity that this project supports."""
    read = AfmoeConfig.read(config, "afmoe")
    moe, head_dim, scaled = read_moe(read, MOE, score="sigmoid"), read.head_dim or 128, read.mup_enabled
    pattern = read.pattern(LayerArgs(), LayerArgs(rope=False), read.global_attn_every_n_layers)
    return AfmoeArgs(**read.sizes, head_dim=head_dim, pattern=pattern, scaled_embeddings=scaled, moe=moe)


AFMOE_NAMING = HuggingFaceNaming(
    names=NORMALIZED_SPARSE | MORE, rotary=ROTARY, to_config=to_config, from_config=from_config
)
