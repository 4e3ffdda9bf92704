"""Qwen3, dense models and mixtures of experts (arXiv 2505.09388, tables 1 and 2, and the released configurations)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pydantic

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.args import QKNorm, TransformerArgs
from torchtitan.models.hf_config import CommonConfig
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.naming import EXPERTS, LAYER, NAMES, QK_NORMS, ROTARY, ROUTER, HuggingFaceNaming
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import Positive, Size, Theta
from torchtitan.models.sparse_args import MoEArgs, SparseArgs
from torchtitan.models.transformer import Transformer


@dataclass(frozen=True)
class Qwen3Args(TransformerArgs):
    """Sizes of one dense Qwen3; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 1000000.0
    head_dim: Size = 128
    qk_norm: ClassVar[QKNorm | None] = "head"


@dataclass(frozen=True)
class Qwen3MoEArgs(SparseArgs):
    """Sizes of one sparse Qwen3; `head_dim` as above."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 1000000.0
    head_dim: Size = 128
    qk_norm: ClassVar[QKNorm | None] = "head"


def _dense(dim: int, n_layers: int, n_heads: int, ffn_dim: int, tied: bool = False) -> Qwen3Args:
    return Qwen3Args(dim, n_layers, n_heads, 8, ffn_dim, vocab_size=151936, tied_embeddings=tied)


def _sparse(dim: int, n_layers: int, n_heads: int, ffn_dim: int, expert_dim: int) -> Qwen3MoEArgs:
    moe = MoEArgs(n_experts=128, top_k=8, ffn_dim=expert_dim)
    return Qwen3MoEArgs(dim, n_layers, n_heads, 4, ffn_dim, vocab_size=151936, moe=moe)


QWEN3 = {
    "debugmodel": Qwen3Args(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=None, head_dim=64),
    "0.6B": _dense(1024, 28, 16, 3072, tied=True),
    "1.7B": _dense(2048, 28, 16, 6144, tied=True),
    "4B": _dense(2560, 36, 32, 9728, tied=True),
    "8B": _dense(4096, 36, 32, 12288),
    "14B": _dense(5120, 40, 40, 17408),
    "32B": _dense(5120, 64, 64, 25600),
}
QWEN3_MOE = {
    # Active parameters of the dense debugmodel.
    "debugmodel": Qwen3MoEArgs(256, 6, 8, 4, 768, None, head_dim=64, moe=MoEArgs(n_experts=8, top_k=2, ffn_dim=384)),
    "30B-A3B": _sparse(2048, 48, 32, 6144, 768),
    "235B-A22B": _sparse(4096, 94, 64, 12288, 1536),
}


class Qwen3Config(CommonConfig):
    """`config.json` (Qwen3Config)."""

    ARGS: ClassVar[type[TransformerArgs]] = Qwen3Args
    MODEL_TYPE, ARCHITECTURE = "qwen3", "Qwen3ForCausalLM"
    DEFAULT_HEAD_DIM: ClassVar[int | None] = 128

    use_sliding_window: Literal[False] = False


class Qwen3MoEConfig(Qwen3Config):
    """`config.json` (Qwen3MoeConfig), whose class has no default for head_dim."""

    ARGS, MODEL_TYPE, ARCHITECTURE = Qwen3MoEArgs, "qwen3_moe", "Qwen3MoeForCausalLM"
    MOE: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn_dim": "moe_intermediate_size",
        "normalize": "norm_topk_prob",
    }
    DEFAULT_HEAD_DIM = None

    num_experts: Size = pydantic.Field(validation_alias=pydantic.AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    mlp_only_layers: tuple[NonNegativeInt, ...] = ()
    norm_topk_prob: pydantic.StrictBool = False
    decoder_sparse_step: Literal[1] = 1

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `CommonConfig`."""
        if args.moe.score != "softmax" or args.moe.n_shared_experts or args.moe.scale != 1:
            raise ValueError("Qwen3Moe of transformers has no sigmoid scores, shared experts or factor on the weights")
        return super().to_config(args) | {"mlp_only_layers": list(range(args.moe.n_dense_layers))}

    @property
    def sizes(self) -> dict[str, Any]:
        """As in `CommonConfig`. Raises a ValueError if other layers than the first are dense."""
        sizes, dense = super().sizes, self.mlp_only_layers
        if sorted(dense) != list(range(len(dense))):
            raise ValueError(f"mlp_only_layers is {dense!r:.60}, but only the first layers can be dense")
        return sizes | {"moe": replace(sizes["moe"], n_dense_layers=len(dense))}


NAMING = HuggingFaceNaming(NAMES | QK_NORMS, ROTARY, Qwen3Config)
SPARSE = NAMES | QK_NORMS | EXPERTS | {ROUTER: f"model.{LAYER}.mlp.gate.weight"}
DENSE = ModelSpec(QWEN3, Transformer, hf=NAMING)
MIXTURE = ModelSpec(QWEN3_MOE, SparseTransformer, hf=HuggingFaceNaming(SPARSE, ROTARY, Qwen3MoEConfig))
