"""Sizes that all decoders have."""

from dataclasses import dataclass, replace

from typing_extensions import Self

from torchtitan.models.rope import Positive, RopeScaling, Size


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

    dim: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size
    ffn_dim: Size
    vocab_size: Size | None
    norm_eps: Positive
    rope_theta: Positive
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: heads do not share key-value heads evenly, or their channels are no pairs.
        """
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} heads cannot share {self.n_kv_heads} key-value heads evenly")
        if self.head_dim % 2 or not self.head_dim:
            raise ValueError(f"a head has {self.head_dim} channels, which RoPE cannot rotate in pairs")

    @property
    def head_dim(self) -> int:
        """Channels of a head; a field in families where they are a size of their own."""
        return self.dim // self.n_heads

    def with_vocab_size(self, vocab_size: int) -> Self:
        """Fills in the vocabulary size if the flavor leaves it to the tokenizer."""
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)
