"""Trinity, which `transformers` calls AFMoE (arXiv 2602.17004, and the released configurations)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.args import LayerArgs, Norms, QKNorm
from torchtitan.models.hf_config import ENTRIES, PatternedConfig
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.naming import EXPERT_BIAS, LAYER, NORMALIZED_SPARSE, ROTARY, ROUTER, HuggingFaceNaming
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import Positive, Size, Theta
from torchtitan.models.sparse_args import MoEArgs, SparseArgs


def windows_without_rope_in_the_fourth(window: int) -> tuple[LayerArgs, ...]:
    return (LayerArgs(window),) * 3 + (LayerArgs(rope=False),)


@dataclass(frozen=True)
class AfmoeArgs(SparseArgs):
    """Sizes of one Trinity; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-5
    rope_theta: Theta = 10000.0
    head_dim: Size = 128
    pattern: tuple[LayerArgs, ...] = windows_without_rope_in_the_fourth(2048)  # type: ignore[misc]  # of the instance
    scaled_embeddings: bool = True  # type: ignore[misc]
    norms: ClassVar[Norms] = "both"
    qk_norm: ClassVar[QKNorm | None] = "head"
    gated_attention: ClassVar[bool] = True


def _experts(n_experts: int, ffn_dim: int, top_k: int = 8, n_dense_layers: int = 2) -> MoEArgs:
    return MoEArgs(n_experts, top_k, ffn_dim, 1, n_dense_layers, score="sigmoid", scale=2.826)


AFMOE = {
    "debugmodel": AfmoeArgs(
        256, 6, 8, 4, 768, None, head_dim=64, pattern=windows_without_rope_in_the_fourth(128), moe=_experts(8, 256, 2)
    ),
    "Nano-6B-A1B": AfmoeArgs(1024, 56, 8, 2, 3072, 200192, moe=_experts(128, 256)),
    "Mini-26B-A3B": AfmoeArgs(2048, 32, 32, 4, 6144, 200192, moe=_experts(128, 1024)),
}
MORE = {
    f"{LAYER}.attention.wg.weight": f"model.{LAYER}.self_attn.gate_proj.weight",
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_norm.weight": f"model.{LAYER}.pre_mlp_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_mlp_layernorm.weight",
    ROUTER: f"model.{LAYER}.mlp.router.gate.weight",
    EXPERT_BIAS: f"model.{LAYER}.mlp.expert_bias",
}


class AfmoeConfig(PatternedConfig):
    """`config.json` (AfmoeConfig)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = AfmoeArgs, "afmoe", "AfmoeForCausalLM"
    ENTRIES = ENTRIES | {"scaled_embeddings": "mup_enabled"}
    MOE: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn_dim": "moe_intermediate_size",
        "n_shared_experts": "num_shared_experts",
        "n_dense_layers": "num_dense_layers",
        "scale": "route_scale",
    }
    MOE_FIXED: ClassVar[Mapping[str, Any]] = {"score": "sigmoid"}
    DEFAULT_HEAD_DIM, FULL_LAYER = 128, LayerArgs(rope=False)

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

    @property
    def full_every(self) -> int:
        return self.global_attn_every_n_layers


FAMILY = ModelSpec(AFMOE, SparseTransformer, hf=HuggingFaceNaming(NORMALIZED_SPARSE | MORE, ROTARY, AfmoeConfig))
