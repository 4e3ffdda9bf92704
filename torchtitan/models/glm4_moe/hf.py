"""GLM-4.5 in Hugging Face `transformers`."""

from typing import Any, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.glm4_moe.args import Glm4MoEArgs
from torchtitan.models.hf_config import CommonConfig, common_config, moe_entries, read_moe
from torchtitan.models.naming import (
    EXPERT_BIAS,
    LAYER,
    NORMALIZED_SPARSE,
    QKV_BIASES,
    ROTARY,
    ROUTER,
    HuggingFaceNaming,
)
from torchtitan.models.rope import Positive, Size

GATES = {
    ROUTER: f"model.{LAYER}.mlp.gate.weight",
    EXPERT_BIAS: f"model.{LAYER}.mlp.gate.e_score_correction_bias",
}
MOE = {
    "n_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn_dim": "moe_intermediate_size",
    "n_shared_experts": "n_shared_experts",
    "n_dense_layers": "first_k_dense_replace",
    "normalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "n_groups": "n_group",
    "top_groups": "topk_group",
}
FIXED = {
    "attention_bias": True,
    "partial_rotary_factor": Glm4MoEArgs.rope_share,
    "num_nextn_predict_layers": 0,
}


class Glm4MoEConfig(CommonConfig):
    """What is read of `config.json`."""

    ROPE_SHARE = Glm4MoEArgs.rope_share

    attention_bias: Literal[True]  # type: ignore[assignment]
    use_qk_norm: pydantic.StrictBool = False
    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: NonNegativeInt = 1
    first_k_dense_replace: NonNegativeInt = 1
    norm_topk_prob: pydantic.StrictBool = True
    routed_scaling_factor: Positive = 1.0
    n_group: Size = 1
    topk_group: Size = 1


def to_config(args: Glm4MoEArgs) -> dict[str, Any]:
    """`config.json` (Glm4MoeConfig)."""
    more = FIXED | moe_entries(args.moe, MOE) | {"use_qk_norm": args.qk_norm is not None}
    return common_config(args, "glm4_moe", "Glm4MoeForCausalLM", **more)


def from_config(config: dict[str, Any]) -> Glm4MoEArgs:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a GLM-4.5 that this project supports."""
    read = Glm4MoEConfig.read(config, "glm4_moe")
    head_dim = read.head_dim or read.hidden_size // read.num_attention_heads
    return Glm4MoEArgs(
        **read.sizes,
        head_dim=head_dim,
        qk_norm="head" if read.use_qk_norm else None,
        moe=read_moe(read, MOE, score="sigmoid"),
    )


GLM4_MOE_NAMING = HuggingFaceNaming(
    names=NORMALIZED_SPARSE | QKV_BIASES | GATES,
    rotary=ROTARY,
    to_config=to_config,
    from_config=from_config,
    ignored=r"model\.layers\.N_LAYERS\..*",  # a layer that predicts a further token
)
