"""Sizes of the Qwen3 models (arXiv 2505.09388, tables 1 and 2, and the released configurations)."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.models.args import QKNorm, TransformerArgs
from torchtitan.models.rope import Positive, Size, Theta
from torchtitan.models.sparse_args import MoEArgs, SparseArgs


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
