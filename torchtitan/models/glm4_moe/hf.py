"""GLM-4.5 in Hugging Face `transformers`."""

from typing import Any, Literal

import pydantic

from torchtitan.models.glm4_moe.args import Glm4MoEArgs
from torchtitan.models.hf_config import GROUPED_MOE, GroupedMoEConfig, common_config, moe_entries, read_moe
from torchtitan.models.naming import (
    GATES,
    NORMALIZED_SPARSE,
    QKV_BIASES,
    ROTARY,
    HuggingFaceNaming,
)

FIXED = {
    "attention_bias": True,
    "partial_rotary_factor": Glm4MoEArgs.rope_share,
    "num_nextn_predict_layers": 0,
}


class Glm4MoEConfig(GroupedMoEConfig):
    """What is read of `config.json`."""

    ROPE_SHARE = Glm4MoEArgs.rope_share

    attention_bias: Literal[True]  # type: ignore[assignment]
    use_qk_norm: pydantic.StrictBool = False


def to_config(args: Glm4MoEArgs) -> dict[str, Any]:
    """`config.json` (Glm4MoeConfig)."""
    more = FIXED | moe_entries(args.moe, GROUPED_MOE) | {"use_qk_norm": args.qk_norm is not None}
    return common_config(args, "glm4_moe", "Glm4MoeForCausalLM", **more)


def from_config(config: dict[str, Any]) -> Glm4MoEArgs:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a GLM-4.5 that this project supports."""
    read = Glm4MoEConfig.read(config, "glm4_moe")
    head_dim = read.head_dim or read.hidden_size // read.num_attention_heads
    return Glm4MoEArgs(
        **read.sizes,
        head_dim=head_dim,
        qk_norm="head" if read.use_qk_norm else None,
        moe=read_moe(read, GROUPED_MOE, score="sigmoid"),
    )


GLM4_MOE_NAMING = HuggingFaceNaming(
    names=NORMALIZED_SPARSE | QKV_BIASES | GATES,
    rotary=ROTARY,
    to_config=to_config,
    from_config=from_config,
    ignored=r"model\.layers\.N_LAYERS\..*",  # a layer that predicts a further token
)
