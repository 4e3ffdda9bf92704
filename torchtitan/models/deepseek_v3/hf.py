"""DeepSeek-V3 in Hugging Face `transformers`."""

from typing import Any, Literal

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.deepseek_v3.args import DeepseekV3Args
from torchtitan.models.hf_config import GROUPED_MOE, GroupedMoEConfig, common_config, moe_entries, read_moe
from torchtitan.models.naming import EXPERTS, GATES, LAYER, NAMES, SHARED_EXPERTS, HuggingFaceNaming
from torchtitan.models.rope import Positive, Size

LATENTS = {
    f"{LAYER}.attention.{ours}.weight": f"model.{LAYER}.self_attn.{theirs}.weight"
    for ours, theirs in {
        "wq_a": "q_a_proj",
        "q_norm": "q_a_layernorm",
        "wq_b": "q_b_proj",
        "wkv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "wkv_b": "kv_b_proj",
    }.items()
}
HEADS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # as in the sizes
FIXED = {
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}


class DeepseekV3Config(GroupedMoEConfig):
    """What is read of `config.json`."""

    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    first_k_dense_replace: NonNegativeInt = 3
    routed_scaling_factor: Positive = 2.5
    n_group: Size
    topk_group: Size
    rope_interleave: Literal[True] = True  # RoPE's pairs are adjacent channels
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"


def to_config(args: DeepseekV3Args) -> dict[str, Any]:
    """`config.json` (DeepseekV3Config)."""
    heads = {name: getattr(args, name) for name in HEADS} | {"head_dim": args.qk_rope_head_dim}
    more = FIXED | moe_entries(args.moe, GROUPED_MOE) | heads
    return common_config(args, "deepseek_v3", "DeepseekV3ForCausalLM", **more)


def from_config(config: dict[str, Any]) -> DeepseekV3Args:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a DeepSeek-V3 that this project
    supports."""
    read = DeepseekV3Config.read(config, "deepseek_v3")
    if read.head_dim not in (None, read.qk_rope_head_dim):
        raise ValueError(f"head_dim is {read.head_dim}, but only qk_rope_head_dim, which RoPE rotates, is supported")
    heads = {name: getattr(read, name) for name in HEADS}
    return DeepseekV3Args(**read.sizes, **heads, moe=read_moe(read, GROUPED_MOE, score="sigmoid"))


# Adjacent channels are pairs in these files, too, so no rows have to change places.
DEEPSEEK_V3_NAMING = HuggingFaceNaming(
    names=NAMES | LATENTS | EXPERTS | SHARED_EXPERTS | GATES,
    rotary=frozenset(),
    to_config=to_config,
    from_config=from_config,
    ignored=r"model\.layers\.N_LAYERS\..*",  # a layer that predicts a further token
)
