"""Sizes of Trinity (arXiv 2602.17004, and the released configurations)."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.models.args import LayerArgs, Norms, QKNorm
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
