"""Sizes of the sparse Qwen3 models (arXiv 2505.09388, table 2, and the released configurations)."""

from dataclasses import dataclass

from torchtitan.models.args import MoEArgs, SparseArgs
from torchtitan.models.rope import Positive, Size, Theta


@dataclass(frozen=True)
class Qwen3MoEArgs(SparseArgs):
    """Sizes of one sparse Qwen3; `head_dim` is set separately, as in the dense ones."""

    norm_eps: Positive = 1e-6
    rope_theta: Theta = 1000000.0
    head_dim: Size = 128


def _qwen3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, expert_dim: int) -> Qwen3MoEArgs:
    moe = MoEArgs(n_experts=128, top_k=8, ffn_dim=expert_dim)
    return Qwen3MoEArgs(dim, n_layers, n_heads, 4, ffn_dim, vocab_size=151936, moe=moe)


QWEN3_MOE = {
    # Active parameters of qwen3's debugmodel.
    "debugmodel": Qwen3MoEArgs(256, 6, 8, 4, 768, None, head_dim=64, moe=MoEArgs(n_experts=8, top_k=2, ffn_dim=384)),
    "30B-A3B": _qwen3(2048, 48, 32, 6144, 768),
    "235B-A22B": _qwen3(4096, 94, 64, 12288, 1536),
}
