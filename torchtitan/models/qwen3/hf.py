"""Qwen3 in Hugging Face `transformers`."""

from functools import partial
from typing import Any, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.args import MoEArgs
from torchtitan.models.hf_config import CommonConfig, common_config
from torchtitan.models.naming import LAYER, NAMES, QK_NORMS, ROTARY, HuggingFaceNaming
from torchtitan.models.qwen3.args import Qwen3Args, Qwen3MoEArgs
from torchtitan.models.rope import Size

MOE, MLP = f"{LAYER}.moe", f"model.{LAYER}.mlp"
EXPERT_NAMES = {
    f"{MOE}.router.gate.weight": f"{MLP}.gate.weight",
    f"{MOE}.experts.w1.weight": f"{MLP}.experts.*.gate_proj.weight",
    f"{MOE}.experts.w2.weight": f"{MLP}.experts.*.down_proj.weight",
    f"{MOE}.experts.w3.weight": f"{MLP}.experts.*.up_proj.weight",
}


class Qwen3Config(CommonConfig):
    """What is read of `config.json`."""

    use_sliding_window: Literal[False] = False


class Qwen3MoEConfig(Qwen3Config):
    """What is read of `config.json`."""

    num_experts: Size = pydantic.Field(validation_alias=pydantic.AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    mlp_only_layers: tuple[NonNegativeInt, ...] = ()
    norm_topk_prob: pydantic.StrictBool = False
    decoder_sparse_step: Literal[1] = 1


def qwen3_args(config: dict[str, Any]) -> Qwen3Args:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a Qwen3 that this project supports."""
    read = Qwen3Config.read(config, "qwen3")
    return Qwen3Args(**read.sizes, head_dim=read.head_dim or 128)


def sparse_to_config(args: Qwen3MoEArgs) -> dict[str, Any]:
    """`config.json` of a sparse model (Qwen3MoeConfig). Raises a ValueError if `transformers` has no such model."""
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


def sparse_from_config(config: dict[str, Any]) -> Qwen3MoEArgs:
    """The same for a sparse Qwen3."""
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


QWEN3_NAMING = HuggingFaceNaming(
    names=NAMES | QK_NORMS,
    rotary=ROTARY | QK_NORMS.keys(),
    to_config=partial(common_config, model_type="qwen3", architecture="Qwen3ForCausalLM", use_sliding_window=False),
    from_config=qwen3_args,
)
HUGGING_FACE_MOE = HuggingFaceNaming(
    names=NAMES | QK_NORMS | EXPERT_NAMES,
    rotary=QWEN3_NAMING.rotary,
    to_config=sparse_to_config,
    from_config=sparse_from_config,
)
