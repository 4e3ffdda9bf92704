"""Qwen3 in Hugging Face `transformers`."""

from functools import partial
from typing import Any, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.hf_config import CommonConfig, common_config, moe_entries, read_moe
from torchtitan.models.naming import EXPERTS, LAYER, NAMES, QK_NORMS, ROTARY, ROUTER, HuggingFaceNaming
from torchtitan.models.qwen3.args import Qwen3Args, Qwen3MoEArgs
from torchtitan.models.rope import Size

MOE = {
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "ffn_dim": "moe_intermediate_size",
    "normalize": "norm_topk_prob",
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
        **moe_entries(moe, MOE),
    }


def sparse_from_config(config: dict[str, Any]) -> Qwen3MoEArgs:
    """The same for a sparse Qwen3."""
    read = Qwen3MoEConfig.read(config, "qwen3_moe")
    dense = read.mlp_only_layers
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense!r:.60}, but only the first layers can be dense")
    moe = read_moe(read, MOE, n_dense_layers=len(dense))
    # Unlike the class for dense models, the one for these in `transformers` has no default for head_dim.
    head_dim = read.head_dim or read.hidden_size // read.num_attention_heads
    return Qwen3MoEArgs(**read.sizes, head_dim=head_dim, moe=moe)


QWEN3_NAMING = HuggingFaceNaming(
    names=NAMES | QK_NORMS,
    rotary=ROTARY,
    to_config=partial(common_config, model_type="qwen3", architecture="Qwen3ForCausalLM", use_sliding_window=False),
    from_config=qwen3_args,
)
HUGGING_FACE_MOE = HuggingFaceNaming(
    names=NAMES | QK_NORMS | EXPERTS | {ROUTER: f"model.{LAYER}.mlp.gate.weight"},
    rotary=ROTARY,
    to_config=sparse_to_config,
    from_config=sparse_from_config,
)
