"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783)."""

from torchtitan.models.attention import Attention
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.transformer import FeedForward, Transformer, TransformerBlock


class Llama(Transformer):
    """Every block has grouped-query attention and a SwiGLU feed-forward."""

    def make_block(self, args: LlamaArgs, layer: int) -> TransformerBlock:
        return TransformerBlock(args, Attention(args), FeedForward(args.dim, args.ffn_dim))
