"""Sparse Qwen3 models in Hugging Face `transformers`."""

from typing import Any

from torchtitan.models.hf_config import common_config, common_sizes, rope_scaling_of
from torchtitan.models.moe import MoEArgs
from torchtitan.models.naming import LAYER, NAMES, ROTARY, HuggingFaceNaming
from torchtitan.models.qwen3.hf import NORMS
from torchtitan.models.qwen3_moe.args import Qwen3MoEArgs

MOE, THERE = f"{LAYER}.moe", f"model.{LAYER}.mlp"
EXPERTS = {
    f"{MOE}.router.gate.weight": f"{THERE}.gate.weight",
    f"{MOE}.experts.w1.weight": f"{THERE}.experts.*.gate_proj.weight",
    f"{MOE}.experts.w2.weight": f"{THERE}.experts.*.down_proj.weight",
    f"{MOE}.experts.w3.weight": f"{THERE}.experts.*.up_proj.weight",
}


def to_config(args: Qwen3MoEArgs) -> dict[str, Any]:
    """`config.json` of `transformers` (Qwen3MoeConfig).

    Raises:
        ValueError: `transformers` has no such model.
    """
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


def from_config(config: dict[str, Any]) -> Qwen3MoEArgs:
    """The model sizes in a `config.json`.

    Raises:
        ValueError: the model is not a sparse Qwen3 that this project supports.
    """
    sizes = common_sizes(config, "qwen3_moe", use_sliding_window=False, decoder_sparse_step=1)
    rope_scaling_of(config)  # must be none
    dense = config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense}, but only the first layers can be dense")
    moe = MoEArgs(
        n_experts=config.get("num_experts") or config["num_local_experts"],  # the latter from transformers 5
        top_k=config["num_experts_per_tok"],
        ffn_dim=config["moe_intermediate_size"],
        n_dense_layers=len(dense),
        normalize=config.get("norm_topk_prob", False),
    )
    # Unlike that of dense models, its class in `transformers` has no default for head_dim.
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Qwen3MoEArgs(**sizes, head_dim=head_dim, moe=moe)


HUGGING_FACE = HuggingFaceNaming(
    names=NAMES | NORMS | EXPERTS,
    rotary=ROTARY | NORMS.keys(),
    to_config=to_config,
    from_config=from_config,
)
