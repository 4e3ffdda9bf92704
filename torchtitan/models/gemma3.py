"""Gemma 3: its decoder of text (arXiv 2503.19786, and the released configurations)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan.kernels.swiglu import ActivationName
from torchtitan.models.args import LayerArgs, Norms, QKNorm, TransformerArgs
from torchtitan.models.hf_config import ENTRIES, RopeOfKindsConfig
from torchtitan.models.naming import LAYER, NAMES, QK_NORMS, ROTARY, HuggingFaceNaming
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import LinearScaling, Positive, Size, Theta
from torchtitan.models.transformer import Transformer


def windows_in_five_of_six(window: int, theta: float = 10000.0) -> tuple[LayerArgs, ...]:
    """Layers with a window and a base of RoPE of their own, and then one that sees all positions."""
    return (LayerArgs(window, rope_theta=theta, rope_scaled=False),) * 5 + (LayerArgs(),)


@dataclass(frozen=True)
class Gemma3Args(TransformerArgs):
    """Sizes of one Gemma 3; `head_dim` is not dim / n_heads."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 1000000.0
    tied_embeddings: bool = True
    head_dim: Size = 256
    query_pre_attn_scalar: Positive = 256  # its root divides the logits of attention, not that of head_dim
    pattern: tuple[LayerArgs, ...] = windows_in_five_of_six(1024)  # type: ignore[misc]  # of the instance
    norms: ClassVar[Norms] = "both"
    norm_offset: ClassVar[float] = 1.0
    qk_norm: ClassVar[QKNorm | None] = "head"
    scaled_embeddings: ClassVar[bool] = True
    activation: ClassVar[ActivationName] = "geglu"

    @property
    def query_factor(self) -> float:
        return float((self.head_dim / self.query_pre_attn_scalar) ** 0.5)


SHORT, SCALED = windows_in_five_of_six(512), LinearScaling(factor=8.0)
GEMMA3 = {
    "debugmodel": Gemma3Args(256, 6, 8, 4, 768, None, head_dim=64, pattern=windows_in_five_of_six(128)),
    "270M": Gemma3Args(640, 18, 4, 1, 2048, 262144, pattern=SHORT),
    "1B": Gemma3Args(1152, 26, 4, 1, 6912, 262144, pattern=SHORT),
    "4B": Gemma3Args(2560, 34, 8, 4, 10240, 262208, rope_scaling=SCALED),
    "12B": Gemma3Args(3840, 48, 16, 8, 15360, 262208, rope_scaling=SCALED),
    "27B": Gemma3Args(5376, 62, 32, 16, 21504, 262208, rope_scaling=SCALED, head_dim=128, query_pre_attn_scalar=168),
}


MORE = {
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_norm.weight": f"model.{LAYER}.pre_feedforward_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_feedforward_layernorm.weight",
}
Gelu = Literal["gelu_pytorch_tanh"]
GELU: Gelu = "gelu_pytorch_tanh"


class Gemma3Config(RopeOfKindsConfig):
    """`config.json` (Gemma3TextConfig)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = Gemma3Args, "gemma3_text", "Gemma3ForCausalLM"
    ENTRIES = ENTRIES | {"query_pre_attn_scalar": "query_pre_attn_scalar"}
    DEFAULT_THETA, DEFAULT_HEAD_DIM = 1000000.0, 256

    tie_word_embeddings: bool = True
    hidden_act: Gelu = GELU  # type: ignore[assignment]
    hidden_activation: Gelu = GELU
    query_pre_attn_scalar: Positive = 256
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 6
    rope_local_base_freq: Theta = 10000.0
    attn_logit_softcapping: Literal[None] = None
    final_logit_softcapping: Literal[None] = None
    use_bidirectional_attention: Literal[False] = False

    @property
    def full_every(self) -> int:
        return self.sliding_window_pattern

    @property
    def sliding_layer(self) -> LayerArgs:
        return LayerArgs(rope_theta=self.sliding_theta or self.rope_local_base_freq, rope_scaled=False)


FAMILY = ModelSpec(GEMMA3, Transformer, hf=HuggingFaceNaming(NAMES | QK_NORMS | MORE, ROTARY, Gemma3Config))
