"""OLMo 3 (arXiv 2512.13961, and the released configurations)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.args import LayerArgs, Norms, QKNorm, TransformerArgs
from torchtitan.models.hf_config import RopeOfKindsConfig
from torchtitan.models.naming import LAYER, NAMES, QK_NORMS, ROTARY, HuggingFaceNaming
from torchtitan.models.parallelize import SHARDING
from torchtitan.models.registry import ModelSpec
from torchtitan.models.rope import Positive, Theta
from torchtitan.models.transformer import Transformer


def windows_in_three_of_four(window: int) -> tuple[LayerArgs, ...]:
    """Layers with a window, which RoPE's scaling leaves out, and then one that sees all positions."""
    return (LayerArgs(window, rope_scaled=False),) * 3 + (LayerArgs(),)


@dataclass(frozen=True)
class Olmo3Args(TransformerArgs):
    """Sizes of one OLMo 3."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 500000.0
    pattern: tuple[LayerArgs, ...] = windows_in_three_of_four(4096)  # type: ignore[misc]  # of the instance
    norms: ClassVar[Norms] = "after"
    qk_norm: ClassVar[QKNorm | None] = "full"


OLMO3 = {
    "debugmodel": Olmo3Args(256, 4, 8, 4, 768, vocab_size=None, pattern=windows_in_three_of_four(128)),
    "7B": Olmo3Args(4096, 32, 32, 32, 11008, vocab_size=100278),
    "32B": Olmo3Args(5120, 64, 40, 8, 27648, vocab_size=100278),
}


NORMS = {
    f"{LAYER}.attention_post_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    f"{LAYER}.ffn_post_norm.weight": f"model.{LAYER}.post_feedforward_layernorm.weight",
}


NOT_BEFORE = {ours: theirs for ours, theirs in NAMES.items() if not ours.endswith("_norm.weight")}


class Olmo3Config(RopeOfKindsConfig):
    """`config.json` (Olmo3Config)."""

    ARGS, MODEL_TYPE, ARCHITECTURE = Olmo3Args, "olmo3", "Olmo3ForCausalLM"
    DEFAULT_THETA = 500000.0

    rms_norm_eps: Positive = 1e-5

    @property
    def full_every(self) -> int:
        return 4

    @property
    def sizes(self) -> dict[str, Any]:
        """As in `CommonConfig`. Raises a ValueError if RoPE has two bases."""
        sizes = super().sizes
        if self.sliding_theta not in (None, sizes["rope_theta"]):
            raise ValueError("RoPE of sliding_attention has another base than that of full_attention")
        return sizes


# A rank has some of the channels that queries and keys are normalized over.
FULL_WIDTH = SHARDING | {"attention.q_norm": "colwise_norm", "attention.k_norm": "colwise_norm"}
NAMING = HuggingFaceNaming(NOT_BEFORE | NORMS | QK_NORMS, ROTARY, Olmo3Config)
FAMILY = ModelSpec(OLMO3, Transformer, FULL_WIDTH, hf=NAMING)
