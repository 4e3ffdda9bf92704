"""gpt-oss in Hugging Face `transformers`."""

from typing import Any, Literal

from torchtitan.models.args import LayerArgs
from torchtitan.models.gpt_oss.args import LONGER_CONTEXT, GptOssArgs, experts
from torchtitan.models.hf_config import PatternedConfig, common_config, pattern_entries, published_scaling
from torchtitan.models.naming import LAYER, NAMES, QKV_BIASES, ROTARY, ROUTER, HuggingFaceNaming
from torchtitan.models.rope import Positive, Size

EXPERTS, PUBLISHED = f"{LAYER}.moe.experts", f"model.{LAYER}.mlp.experts"
MORE = {
    f"{LAYER}.attention.wo.bias": f"model.{LAYER}.self_attn.o_proj.bias",
    f"{LAYER}.attention.sinks": f"model.{LAYER}.self_attn.sinks",
    ROUTER: f"model.{LAYER}.mlp.router.weight",
    f"{LAYER}.moe.router.gate.bias": f"model.{LAYER}.mlp.router.bias",
    f"{EXPERTS}.w1.weight": f"{PUBLISHED}.gate_up_proj",
    f"{EXPERTS}.w3.weight": f"{PUBLISHED}.gate_up_proj",
    f"{EXPERTS}.w2.weight": f"{PUBLISHED}.down_proj",
    f"{EXPERTS}.w1.bias": f"{PUBLISHED}.gate_up_proj_bias",
    f"{EXPERTS}.w3.bias": f"{PUBLISHED}.gate_up_proj_bias",
    f"{EXPERTS}.w2.bias": f"{PUBLISHED}.down_proj_bias",
}
DENSE = {name: there for name, there in NAMES.items() if ".feed_forward." not in name}


class GptOssConfig(PatternedConfig):
    """What is read of `config.json`."""

    DEFAULT_THETA = 150000.0

    rms_norm_eps: Positive = 1e-5
    attention_bias: Literal[True] = True  # type: ignore[assignment]
    num_local_experts: Size
    num_experts_per_tok: Size = 4
    swiglu_alpha: Literal[1.702] = 1.702  # type: ignore[valid-type]
    swiglu_limit: Literal[7.0] = 7.0  # type: ignore[valid-type]


def to_config(args: GptOssArgs) -> dict[str, Any]:
    """`config.json` (GptOssConfig)."""
    more = {"num_local_experts": args.moe.n_experts, "num_experts_per_tok": args.moe.top_k} | pattern_entries(args)
    rope = published_scaling(args.rope_scaling) or {"rope_type": "default"}  # without an entry, it would be scaled
    return common_config(args, "gpt_oss", "GptOssForCausalLM", attention_bias=True, rope_scaling=rope, **more)


def from_config(config: dict[str, Any]) -> GptOssArgs:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a gpt-oss that this project supports."""
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_scaling": published_scaling(LONGER_CONTEXT)}
    read = GptOssConfig.read(config, "gpt_oss")
    return GptOssArgs(
        **read.sizes,
        head_dim=read.head_dim or 64,
        pattern=read.pattern(LayerArgs(), LayerArgs(), 2),
        moe=experts(read.num_local_experts, read.intermediate_size, read.num_experts_per_tok),
    )


GPT_OSS_NAMING = HuggingFaceNaming(
    names=DENSE | QKV_BIASES | MORE,
    rotary=ROTARY,
    to_config=to_config,
    from_config=from_config,
    transposed=frozenset(f"{EXPERTS}.{layer}.weight" for layer in ("w1", "w2", "w3")),
)
