"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783)."""

from torchtitan.models.transformer import Transformer


class Llama(Transformer):
    """Every block has grouped-query attention and a SwiGLU feed-forward."""
