"""Types passed between layers of the architecture.

Shapes: T tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from torchtitan.errors import UserError

CrossEntropyFunction = Callable[..., tuple[Tensor, Tensor]]
"""From (T, V) logits and (T,) labels: the cross-entropy summed over tokens, in float32, and its gradient with respect
to the logits, in their dtype. May overwrite the logits. `softcap=c` is for the cross-entropy of c tanh(logits / c);
`z_loss=z` adds the gradient of z logsumexp(logits)² for each token that counts (PaLM, arXiv 2204.02311)."""

LossByRow = Callable[[CrossEntropyFunction, Tensor], CrossEntropyFunction]
"""Given labels (B, S): the same function for their chunks, of which it sees the loss of each row."""

MTP = "mtp."
"""What the names of parameters of multi-token prediction begin with (`models.mtp`)."""

IN_BLOCKS = ("layers.", MTP)
"""What the names of parameters in blocks begin with."""

IGNORE_INDEX = -100
"""Label of positions without a loss; the default of torch's cross_entropy."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention computes. Every implementation does all of it or refuses the layer.

    Attributes:
        causal: A position attends to itself and to earlier ones only.
        window: how many positions a position attends to at most, itself included; None: all.
        documents: Attention stays within a document where a batch has document ids; if False, it refuses them.
        sinks: The softmax of each head has a further, learned logit, whose value is zero.
        scale: the factor on q kᵀ; None: 1 / sqrt(head_dim).
        softcap: Logits become softcap * tanh(logits / softcap); None: they stay as they are.
    """

    causal: bool = True
    window: int | None = None
    documents: bool = True
    sinks: bool = False
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Raises a UserError if a window does not even hold the position itself."""
        if self.window is not None and self.window < 1:
            raise UserError(
                f"The model's attention declares window = {self.window}, but a window has at least one position; None "
                "is for all."
            )

    def positions(self, seq_len: int) -> float:
        """How many positions a token attends to as if attention were not causal, the mean over tokens.

        Without a window these are S. A window of W <= S positions holds the pairs of positions less than W apart: of
        the S x S pairs, S (2 W - 1) - W (W - 1). Causal attention has half of either, as is customary.
        """
        window = min(self.window or seq_len, seq_len)
        return 2 * window - 1 - window * (window - 1) / seq_len

    def needs(self, documents: bool = False) -> list[str]:
        """The fields that an implementation of plain causal attention does not do. `documents`: there are ids."""
        usual = {"causal": True, "window": None, "sinks": False, "scale": None, "softcap": None}
        return [name for name in usual if getattr(self, name) != usual[name]] + ["documents"] * documents

    def require(self, implementation: str, does: Collection[str]) -> None:
        """A UserError if the implementation does not do what the layer needs."""
        if missing := [need for need in self.needs() if need not in does]:
            raise self.refusal(missing, implementation)

    def refusal(self, needs: Collection[str], implementation: str) -> UserError:
        declared = ", ".join(f"{need} = {getattr(self, need)}" for need in needs)
        return UserError(f"The model's attention declares {declared}, which is not supported by {implementation}.")


class ModelArgs(Protocol):
    """Sizes of a model: a frozen dataclass such as `models.args.TransformerArgs`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def dim(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def n_heads(self) -> int: ...

    @property
    def n_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def tied_embeddings(self) -> bool: ...

    @property
    def moe(self) -> Any:
        """A `models.sparse_args.MoEArgs`; None without experts."""

    def with_vocab_size(self, vocab_size: int) -> "ModelArgs": ...

    def attention_spec(self, layer: int) -> AttentionSpec:
        """What the attention of a layer computes, by the layer's number."""


def attended_channels(args: ModelArgs) -> float:
    """The width of attention's products, over all heads: of queries with keys and of weights with values, the mean."""
    return args.n_heads * (args.head_dim + getattr(args, "v_head_dim", args.head_dim)) / 2


class Decoder(nn.Module):
    """A model, or a pipeline stage of it with the missing modules None; it has the attributes of
    `models.transformer.Transformer`."""

    args: ModelArgs
    tok_embeddings: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    output: nn.Module | None
    positions: Tensor | None
    z_loss: float | None
    by_row: LossByRow | None
    init_std: Callable[[str], float | None]
    __call__: Callable[..., Tensor]


class Hook:
    """What a run calls between its steps, on every rank. `run` is its `torchtitan.run.trainer.Trainer`, of which a hook
    reads what docs/extension.md names, and changes nothing. Metrics are numbers by name.

    Attributes:
        lr_factor: multiplies the learning rate of the next steps, at least 0. Rank 0's counts; checkpoints hold it.
    """

    lr_factor: float = 1.0

    def on_start(self, run: Any) -> None:
        """Before the first step of each start and stage, after `load_state_dict`. May add hooks to modules."""

    def after_step(self, run: Any) -> Mapping[str, float] | None:
        """After each step, performed or skipped, and its report. Gradients are deleted by then. May set `lr_factor`;
        returns metrics."""

    def after_validation(self, run: Any, loss: float) -> Mapping[str, float] | None:
        """After each validation. May set `lr_factor`; returns metrics."""

    def before_save(self, run: Any) -> None:
        """Before each checkpoint. May change what `state_dict` returns."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON. Rank 0's is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it, on every rank. Not called without such state, as when the hook is new."""


class Passes(NamedTuple):
    """Number of forward and backward passes."""

    forward: int
    backward: int
