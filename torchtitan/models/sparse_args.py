"""Sizes of decoders with mixtures of experts."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import NonNegativeInt
from torchtitan.kernels.swiglu import GatedName
from torchtitan.models.args import TransformerArgs
from torchtitan.models.rope import Positive, Size


@dataclass(frozen=True)
class MoEArgs:
    """Sizes of the mixtures of experts of a model."""

    n_experts: Size  # routed experts of a layer
    top_k: Size  # experts of a token
    ffn_dim: Size  # inner width of an expert
    n_shared_experts: NonNegativeInt = 0  # experts that see every token, computed as one of their total width
    n_dense_layers: NonNegativeInt = 0  # first layers of the model, which have a dense feed-forward instead
    score: Literal["softmax", "sigmoid"] = "softmax"  # an expert's score for a token, made from the router's logits
    normalize: bool = True  # divide the scores of a token's experts by their sum
    scale: Positive = 1.0  # factor on these weights
    n_groups: Size = 1  # experts in a row, by whose two best scores a token chooses groups (arXiv 2412.19437)
    top_groups: Size = 1  # groups that a token's experts are from
    activation: GatedName = "swiglu"  # in experts
    biases: bool = False  # in router and experts

    def __post_init__(self) -> None:
        """Raises a ValueError if a token would have more experts than there are, or groups would not be equal, have at
        least two experts, and have as many as a token needs."""
        if self.top_k > self.n_experts:
            raise ValueError(f"a token cannot have {self.top_k} of {self.n_experts} experts")
        in_group, left = divmod(self.n_experts, self.n_groups)
        if left or (self.n_groups > 1 and in_group < 2):
            raise ValueError(f"{self.n_experts} experts cannot be in {self.n_groups} equal groups of two or more")
        if self.top_groups > self.n_groups or self.top_k > self.top_groups * in_group:
            choice = f"{self.top_groups} of {self.n_groups} groups of {in_group}"
            raise ValueError(f"a token cannot have {self.top_k} experts from {choice}")


@dataclass(frozen=True)
class SparseArgs(TransformerArgs):
    """Sizes of a decoder with mixtures of experts; `ffn_dim` is for the first, dense layers."""

    moe: MoEArgs = field(kw_only=True)  # type: ignore[misc]  # of the instance, not of the class
