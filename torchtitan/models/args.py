"""Sizes that all decoders have."""

from dataclasses import dataclass, replace

from typing_extensions import Self

from torchtitan.models.rope import RopeScaling


@dataclass(frozen=True)
class TransformerArgs:
    """Sizes of one decoder-only transformer; a family adds its own, and default values.

    Attributes:
        dim: width of the residual stream.
        n_kv_heads: key-value heads; grouped-query attention if fewer than n_heads.
        ffn_dim: inner width of the SwiGLU feed-forward.
        vocab_size: None takes the tokenizer's.
        tied_embeddings: the output layer shares the embedding's weight.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int | None
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Channels of a head; a field in families where they are a size of their own."""
        return self.dim // self.n_heads

    def with_vocab_size(self, vocab_size: int) -> Self:
        """Fills in the vocabulary size if the flavor leaves it to the tokenizer."""
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)
