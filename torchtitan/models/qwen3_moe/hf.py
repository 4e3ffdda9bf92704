"""Sparse Qwen3 models in Hugging Face `transformers`."""

from typing import Any, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.args import MoEArgs
from torchtitan.models.hf_config import common_config
from torchtitan.models.naming import LAYER, NAMES, ROTARY, HuggingFaceNaming
from torchtitan.models.qwen3.hf import NORMS, Qwen3Config
from torchtitan.models.qwen3_moe.args import Qwen3MoEArgs
from torchtitan.models.rope import Size

MOE, THERE = f"{LAYER}.moe", f"model.{LAYER}.mlp"
EXPERTS = {
    f"{MOE}.router.gate.weight": f"{THERE}.gate.weight",
    f"{MOE}.experts.w1.weight": f"{THERE}.experts.*.gate_proj.weight",
    f"{MOE}.experts.w2.weight": f"{THERE}.experts.*.down_proj.weight",
    f"{MOE}.experts.w3.weight": f"{THERE}.experts.*.up_proj.weight",
}


def to_config(args: Qwen3MoEArgs) -> dict[str, Any]:
    """`config.json` of `transformers` (Qwen3MoeConfig). Raises a ValueError if `transformers` has no such model."""
    moe = args.moe
    if moe.score != "softmax" or moe.n_shared_experts or moe.scale != 1:
        raise ValueError("Qwen3Moe of transformers has no sigmoid scores, shared experts or factor on the weights")
    return common_config(args, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.n_dense_layers)),
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_dim,
        "norm_topk_prob": moe.normalize,
    }


class Qwen3MoEConfig(Qwen3Config):
    """What is read of `config.json`."""

    num_experts: Size = pydantic.Field(validation_alias=pydantic.AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    mlp_only_layers: tuple[NonNegativeInt, ...] = ()
    norm_topk_prob: pydantic.StrictBool = False
    decoder_sparse_step: Literal[1] = 1


def from_config(config: dict[str, Any]) -> Qwen3MoEArgs:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a sparse Qwen3 that this project
    supports."""
    read = Qwen3MoEConfig.read(config, "qwen3_moe")
    dense = read.mlp_only_layers
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense!r:.60}, but only the first layers can be dense")
    moe = MoEArgs(
        n_experts=read.num_experts,
        top_k=read.num_experts_per_tok,
        ffn_dim=read.moe_intermediate_size,
        n_dense_layers=len(dense),
        normalize=read.norm_topk_prob,
    )
    # Unlike the class for dense models, the one for these in `transformers` has no default for head_dim.
    head_dim = read.head_dim or read.hidden_size // read.num_attention_heads
    return Qwen3MoEArgs(**read.sizes, head_dim=head_dim, moe=moe)


HUGGING_FACE = HuggingFaceNaming(
    names=NAMES | NORMS | EXPERTS,
    rotary=ROTARY | NORMS.keys(),
    to_config=to_config,
    from_config=from_config,
)
