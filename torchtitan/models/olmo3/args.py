"""Sizes of OLMo 3 (arXiv 2512.13961, and the released configurations)."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.models.args import LayerArgs, Norms, QKNorm, TransformerArgs
from torchtitan.models.rope import Positive, Theta


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
