"""GLM-4.5 (arXiv 2508.06471, and the released configurations)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic

from torchtitan.models.args import QKNorm
from torchtitan.models.hf_config import GroupedMoEConfig
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.naming import AFTER_THE_LAST, GATES, NORMALIZED_SPARSE, QKV_BIASES, ROTARY, HuggingFaceNaming
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import Positive, Size, Theta
from torchtitan.models.sparse_args import MoEArgs, SparseArgs


@dataclass(frozen=True)
class Glm4MoEArgs(SparseArgs):
    """Sizes of one GLM-4.5; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-5
    rope_theta: Theta = 1000000.0
    head_dim: Size = 128
    qk_norm: QKNorm | None = None  # type: ignore[misc]  # of the instance
    qkv_bias: ClassVar[bool] = True
    rope_share: ClassVar[float] = 0.5


def _experts(n_experts: int, top_k: int, ffn_dim: int, n_dense_layers: int, scale: float = 1.0) -> MoEArgs:
    return MoEArgs(n_experts, top_k, ffn_dim, 1, n_dense_layers, score="sigmoid", scale=scale)


GLM4_MOE = {
    "debugmodel": Glm4MoEArgs(256, 6, 8, 4, 768, None, head_dim=64, moe=_experts(8, 2, 256, 1)),
    "Air-106B-A12B": Glm4MoEArgs(4096, 46, 96, 8, 10944, 151552, moe=_experts(128, 8, 1408, 1)),
    "355B-A32B": Glm4MoEArgs(5120, 92, 96, 8, 12288, 151552, qk_norm="head", moe=_experts(160, 8, 1536, 3, 2.5)),
}


class Glm4MoEConfig(GroupedMoEConfig):
    """`config.json` (Glm4MoeConfig)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = Glm4MoEArgs, "glm4_moe", "Glm4MoeForCausalLM"

    attention_bias: Literal[True]  # type: ignore[assignment]
    use_qk_norm: pydantic.StrictBool = False

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `CommonConfig`."""
        return super().to_config(args) | {"use_qk_norm": args.qk_norm is not None}

    @property
    def sizes(self) -> dict[str, Any]:
        return super().sizes | {"qk_norm": "head" if self.use_qk_norm else None}


NAMING = HuggingFaceNaming(NORMALIZED_SPARSE | QKV_BIASES | GATES, ROTARY, Glm4MoEConfig, ignored=AFTER_THE_LAST)
FAMILY = ModelSpec(GLM4_MOE, SparseTransformer, hf=NAMING)
