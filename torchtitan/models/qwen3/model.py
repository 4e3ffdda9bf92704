"""Qwen3 (arXiv 2505.09388): a Llama with a head size that is set separately, and normalized queries and keys.

Shapes: B batch, S sequence, H query heads, G key-value heads, D channels of a head.
"""

import torch

from torchtitan.models.args import TransformerArgs
from torchtitan.models.attention import Attention
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.norm import RMSNorm
from torchtitan.models.parallelize import SHARDING as SHARED_SHARDING
from torchtitan.models.transformer import Transformer
from torchtitan.parallel.dims import Style

# Under tensor parallelism, a rank normalizes the heads that it has.
SHARDING: dict[str, Style] = {**SHARED_SHARDING, "attention.q_norm": "heads", "attention.k_norm": "heads"}


class NormalizedAttention(Attention):
    """Attention whose queries and keys have an RMSNorm over the channels of each head before RoPE."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        self.q_norm = RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = RMSNorm(args.head_dim, eps=args.norm_eps)

    def before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), self.k_norm(k)


class Qwen3(Transformer):
    """Every block has normalized attention and a SwiGLU feed-forward."""

    attention = NormalizedAttention


class Qwen3MoE(SparseTransformer):
    """Every block has normalized attention and a mixture of experts."""

    attention = NormalizedAttention
