"""Qwen3 with mixtures of experts (arXiv 2505.09388)."""

from torchtitan.models.moe import SparseTransformer
from torchtitan.models.qwen3.model import NormalizedAttention


class Qwen3MoE(SparseTransformer):
    """Every block has the attention of the dense models, and a mixture of experts."""

    attention = NormalizedAttention
