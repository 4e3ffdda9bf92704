"""Sizes of decoders, dense ones and mixtures of experts."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator
from typing_extensions import Self

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.rope import Positive, RopeScaling, Size, Theta, read_scaling


@dataclass(frozen=True)
class MoEArgs:
    """Sizes of the mixtures of experts of a model.

    Attributes:
        n_experts: routed experts of a layer.
        top_k: experts of a token.
        ffn_dim: inner width of an expert.
        n_shared_experts: experts that see every token, computed as one of their total width.
        n_dense_layers: first layers of the model, which have a dense feed-forward instead.
        score: of an expert for a token, from the router's logits.
        normalize: divide the scores of a token's experts by their sum.
        scale: factor on these weights.
    """

    n_experts: Size
    top_k: Size
    ffn_dim: Size
    n_shared_experts: NonNegativeInt = 0
    n_dense_layers: NonNegativeInt = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: Positive = 1.0

    def __post_init__(self) -> None:
        """Raises a ValueError if a token would have more experts than there are."""
        if self.top_k > self.n_experts:
            raise ValueError(f"a token cannot have {self.top_k} of {self.n_experts} experts")


@dataclass(frozen=True)
class TransformerArgs:
    """Sizes of one decoder-only transformer; a family adds its own, and default values.

    Attributes:
        dim: width of the residual stream.
        n_kv_heads: key-value heads; grouped-query attention if fewer than n_heads.
        ffn_dim: inner width of the SwiGLU feed-forward.
        vocab_size: None takes the tokenizer's.
        tied_embeddings: the output layer shares the embedding's weight.
        moe: None in a dense model, whose checkpoints do not record it.
    """

    dim: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size
    ffn_dim: Size
    vocab_size: Size | None
    norm_eps: Positive
    rope_theta: Theta
    rope_scaling: Annotated[RopeScaling | None, BeforeValidator(read_scaling)] = None
    tied_embeddings: bool = False
    moe: ClassVar[MoEArgs | None] = None

    def __post_init__(self) -> None:
        """Raises a ValueError if heads do not share key-value heads evenly, or their channels are no pairs."""
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


@dataclass(frozen=True)
class SparseArgs(TransformerArgs):
    """Sizes of a decoder with mixtures of experts; `ffn_dim` is for the first, dense layers."""

    moe: MoEArgs = field(kw_only=True)  # type: ignore[misc]  # of the instance, not of the class
