"""Sizes of decoders."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator
from typing_extensions import Self

from torchtitan.kernels.swiglu import ActivationName
from torchtitan.models.rope import Positive, RopeScaling, Size, Theta, read_scaling
from torchtitan.protocols import AttentionSpec

Norms = Literal["before", "after", "both"]
"""Where norms are in the branches of the residual stream: before attention and feed-forward, after them, or both."""

QKNorm = Literal["head", "full"]
"""What the norms of queries and keys normalize: the channels of a head, or those of all heads together."""


@dataclass(frozen=True)
class LayerArgs:
    """What may differ from layer to layer."""

    window: Size | None = None  # positions that a position attends to at most, itself included; None: all
    rope: bool = True  # rotate queries and keys; without, a layer does not know positions (NoPE, arXiv 2305.19466)
    rope_theta: Theta | None = None  # a base of its own; None: the model's
    rope_scaled: bool = True  # whether the model's rope_scaling applies


class RopeArgs(NamedTuple):
    """What a table of RoPE is made of."""

    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True)
class TransformerArgs:
    """Sizes of one decoder-only transformer; a family adds its own, and default values.

    What is a class variable here holds for all models of a family, or is a field of its sizes. Checkpoints record
    fields only.
    """

    dim: Size  # width of the residual stream
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size  # grouped-query attention if fewer than n_heads
    ffn_dim: Size  # inner width of the feed-forward
    vocab_size: Size | None  # None takes the tokenizer's
    norm_eps: Positive
    rope_theta: Theta
    rope_scaling: Annotated[RopeScaling | None, BeforeValidator(read_scaling)] = None
    tied_embeddings: bool = False  # the output layer shares the embedding's weight
    moe: ClassVar[Any] = None  # a `sparse_args.MoEArgs`, in families with experts
    pattern: ClassVar[tuple[LayerArgs, ...]] = (LayerArgs(),)  # repeated over the layers, the last time perhaps in part
    norms: ClassVar[Norms] = "before"
    norm_offset: ClassVar[float] = 0.0  # norms multiply by weight + this, and then start at this
    qk_norm: ClassVar[QKNorm | None] = None
    qkv_bias: ClassVar[bool] = False  # the projections to queries, keys and values have biases
    sinks: ClassVar[bool] = False  # the softmax of a head has a further, learned logit, whose value is zero
    wo_bias: ClassVar[bool] = False  # the projection from the heads has a bias
    gated_attention: ClassVar[bool] = False  # the output of each channel of a head is times sigmoid(wg x)
    rope_share: ClassVar[float] = 1.0  # RoPE rotates this share of a head's channels, the first ones
    scaled_embeddings: ClassVar[bool] = False  # times sqrt(dim)
    logit_softcap: ClassVar[float | None] = None  # logits become softcap * tanh(logits / softcap)
    activation: ClassVar[ActivationName] = "swiglu"  # dense feed-forward layers have it

    def __post_init__(self) -> None:
        """Raises a ValueError if heads do not share key-value heads evenly, or RoPE would rotate an odd number of
        channels, or no layer is declared."""
        if not self.pattern:
            raise ValueError("pattern is empty, but declares at least one layer")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} heads cannot share {self.n_kv_heads} key-value heads evenly")
        if self.rope_dim % 2 or not self.rope_dim:
            share = "" if self.rope_share == 1 else f" of which {self.rope_dim} are rotated,"
            raise ValueError(f"a head has {self.head_dim} channels,{share} which RoPE cannot rotate in pairs")

    @property
    def head_dim(self) -> int:
        """Channels of a head; a field in families where they are a size of their own."""
        return self.dim // self.n_heads

    @property
    def rope_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        return int(self.head_dim * self.rope_share)

    @property
    def query_factor(self) -> float:
        """Factor on queries, and so on the logits of attention."""
        return 1.0

    def layer(self, number: int) -> LayerArgs:
        """What the pattern says of this layer."""
        return self.pattern[number % len(self.pattern)]

    def attention_spec(self, layer: int) -> AttentionSpec:
        """What the attention of this layer computes."""
        return AttentionSpec(window=self.layer(layer).window, sinks=self.sinks)

    def rope(self, layer: int) -> RopeArgs | None:
        """How this layer rotates queries and keys; None if it does not."""
        args = self.layer(layer)
        if not args.rope:
            return None
        return RopeArgs(args.rope_theta or self.rope_theta, self.rope_scaling if args.rope_scaled else None)

    def with_vocab_size(self, vocab_size: int) -> Self:
        """Fills in the vocabulary size if the flavor leaves it to the tokenizer."""
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)
