"""gpt-oss (arXiv 2508.10925, and the released configurations)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from torchtitan.models.args import LayerArgs, TransformerArgs
from torchtitan.models.hf_config import PatternedConfig, published_scaling
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.naming import LAYER, NAMES, QKV_BIASES, ROTARY, ROUTER, HuggingFaceNaming
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import Positive, RopeScaling, Size, Theta, YarnScaling, read_scaling
from torchtitan.models.sparse_args import MoEArgs, SparseArgs


def windows_in_every_other(window: int) -> tuple[LayerArgs, ...]:
    return LayerArgs(window), LayerArgs()


LONGER_CONTEXT = YarnScaling(factor=32.0, original=4096, truncate=False)


@dataclass(frozen=True)
class GptOssArgs(SparseArgs):
    """Sizes of one gpt-oss, in which all layers have experts; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-5
    rope_theta: Theta = 150000.0
    rope_scaling: Annotated[RopeScaling | None, BeforeValidator(read_scaling)] = LONGER_CONTEXT
    head_dim: Size = 64
    pattern: tuple[LayerArgs, ...] = windows_in_every_other(128)  # type: ignore[misc]  # of the instance
    sinks: ClassVar[bool] = True
    qkv_bias: ClassVar[bool] = True
    wo_bias: ClassVar[bool] = True


def experts(n_experts: int, ffn_dim: int = 2880, top_k: int = 4) -> MoEArgs:
    return MoEArgs(n_experts, top_k, ffn_dim, activation="clamped_swiglu", biases=True)


GPT_OSS = {
    "debugmodel": GptOssArgs(256, 6, 8, 4, 256, None, rope_scaling=None, moe=experts(8, 256, 2)),
    "20B-A4B": GptOssArgs(2880, 24, 64, 8, 2880, 201088, moe=experts(32)),
    "120B-A5B": GptOssArgs(2880, 36, 64, 8, 2880, 201088, moe=experts(128)),
}


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
    """`config.json` (GptOssConfig)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = GptOssArgs, "gpt_oss", "GptOssForCausalLM"
    MOE: ClassVar[Mapping[str, str]] = {
        "n_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "ffn_dim": "intermediate_size",
    }
    MOE_FIXED: ClassVar[Mapping[str, Any]] = {"activation": "clamped_swiglu", "biases": True}
    DEFAULT_THETA, DEFAULT_HEAD_DIM = 150000.0, 64

    rms_norm_eps: Positive = 1e-5
    attention_bias: Literal[True] = True  # type: ignore[assignment]
    num_local_experts: Size
    num_experts_per_tok: Size = 4
    swiglu_alpha: Literal[1.702] = 1.702  # type: ignore[valid-type]
    swiglu_limit: Literal[7.0] = 7.0  # type: ignore[valid-type]

    @property
    def full_every(self) -> int:
        return 2

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `CommonConfig`."""
        config = super().to_config(args)
        return config | {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}  # else it would be scaled

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TransformerArgs:
        """As in `CommonConfig`."""
        scaled = config.get("rope_scaling") or config.get("rope_parameters")
        return super().from_config(config if scaled else {**config, "rope_scaling": published_scaling(LONGER_CONTEXT)})


TRANSPOSED = frozenset(f"{EXPERTS}.{layer}.weight" for layer in ("w1", "w2", "w3"))
NAMING = HuggingFaceNaming(DENSE | QKV_BIASES | MORE, ROTARY, GptOssConfig, transposed=TRANSPOSED)
FAMILY = ModelSpec(GPT_OSS, SparseTransformer, hf=NAMING)
