"""What the `config.json` files of all families have in common (Hugging Face `transformers`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

import pydantic
from typing_extensions import Self

from torchtitan.config.fields import NonNegativeInt
from torchtitan.models.args import LayerArgs, TransformerArgs
from torchtitan.models.rope import SPELLINGS, Positive, RopeScaling, Size, Theta, read_scaling
from torchtitan.models.sparse_args import MoEArgs

ORIGINAL = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers


class WrongModelType(ValueError):
    """The file describes a model of another family."""


ENTRIES = {
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "tied_embeddings": "tie_word_embeddings",
}
"""Fields of `TransformerArgs`, and what `transformers` calls them."""


def published_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The entry `rope_scaling` of a `config.json`; the inverse of `read_scaling`."""
    if scaling is None:
        return None
    spellings = {key: spelling for spelling, key in reversed(SPELLINGS.items())}
    return {spellings.get(key, key): value for key, value in asdict(scaling).items() if value is not None}


def common_config(args: TransformerArgs, model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    """The entries that every family writes, and `more`. `architecture` is a class in `transformers`."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        **{entry: getattr(args, field) for field, entry in ENTRIES.items()},
        "rope_scaling": published_scaling(args.rope_scaling),
        "attention_bias": False,
        **more,
    }


class JsonEntries(pydantic.BaseModel):
    """The entries of a JSON file that are read. A null is the same as no entry."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}


def moe_entries(moe: MoEArgs, entries: Mapping[str, str]) -> dict[str, Any]:
    """The entries of mixtures of experts. `entries`: what the family calls fields of `MoEArgs`."""
    return {entry: getattr(moe, field) for field, entry in entries.items()}


def read_moe(read: "CommonConfig", entries: Mapping[str, str], **fixed: Any) -> MoEArgs:
    """The inverse of `moe_entries`. `fixed`: fields that are the same for all models of the family."""
    return MoEArgs(**{field: getattr(read, entry) for field, entry in entries.items()}, **fixed)


GROUPED_MOE = {
    "n_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn_dim": "moe_intermediate_size",
    "n_shared_experts": "n_shared_experts",
    "n_dense_layers": "first_k_dense_replace",
    "normalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "n_groups": "n_group",
    "top_groups": "topk_group",
}
"""What DeepSeek-V3, and families after it, call fields of `MoEArgs`."""


def pattern_entries(args: TransformerArgs) -> dict[str, Any]:
    """The entries of layers with and without a window. Raises a ValueError if windows differ."""
    layers = [args.layer(number) for number in range(args.n_layers)]
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise ValueError(f"the published format has one window for all layers, not {sorted(windows)}")
    return {
        "sliding_window": next(iter(windows), None),
        "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
    }


class Rope(JsonEntries):
    """RoPE; further entries describe its scaling."""

    model_config = pydantic.ConfigDict(extra="allow")

    rope_theta: Theta | None = None
    partial_rotary_factor: float | None = None


class CommonConfig(JsonEntries):
    """What is read of every family's `config.json`. A literal is the only value that is supported."""

    DEFAULT_THETA: ClassVar[float] = 10000.0
    ROPE_SHARE: ClassVar[float] = 1.0  # of the channels of a head

    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    head_dim: Size | None = None
    rms_norm_eps: Positive = 1e-6
    rope_theta: Theta | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None  # transformers 5 writes this one
    max_position_embeddings: Size | None = None
    original_max_position_embeddings: Size | None = None
    tie_word_embeddings: pydantic.StrictBool = False
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    partial_rotary_factor: float | None = None

    @classmethod
    def read(cls, config: dict[str, Any], model_type: str) -> Self:
        """Raises a ValueError if an entry is missing, wrong or not supported; `WrongModelType` if it is the type."""
        if config.get("model_type", model_type) != model_type:
            raise WrongModelType(f"model_type is {config['model_type']!r:.60}, not {model_type!r}")
        read = cls.model_validate(config)
        for share in (read.rope.partial_rotary_factor, read.partial_rotary_factor):
            if share not in (None, cls.ROPE_SHARE):
                raise ValueError(f"partial_rotary_factor is {share}, but only {cls.ROPE_SHARE} is supported")
        if nested := [entry for entry, value in (read.rope.model_extra or {}).items() if isinstance(value, dict)]:
            raise ValueError(f"RoPE differs for {' and '.join(nested)}, which is not supported for {model_type}")
        return read

    @property
    def rope(self) -> Rope:
        """As in `transformers`, which reads the older entry first."""
        return self.rope_scaling or self.rope_parameters or Rope()

    @property
    def scaling(self) -> RopeScaling | None:
        """Raises a ValueError if it is not supported. Entries that its type does not have mean nothing there either."""
        entries = self.rope.model_extra or {}
        original = self.original_max_position_embeddings or entries.get(ORIGINAL, self.max_position_embeddings)
        entries = {"type": "default", **entries, **({} if original is None else {ORIGINAL: original})}
        try:
            return read_scaling(entries, ignore_unknown=True)
        except ValueError as error:
            raise ValueError(f"RoPE scaling: {error}") from None

    @property
    def sizes(self) -> dict[str, Any]:
        """Keyword arguments for `TransformerArgs`, the inverse of `common_config`; families differ in `head_dim`."""
        sizes = {field: getattr(self, entry) for field, entry in ENTRIES.items() if field != "head_dim"}
        return sizes | {
            "n_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "rope_theta": self.rope.rope_theta or self.rope_theta or self.DEFAULT_THETA,
            "rope_scaling": self.scaling,
        }


class GroupedMoEConfig(CommonConfig):
    """What is read of a `config.json` with the entries of `GROUPED_MOE`."""

    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: NonNegativeInt = 1
    first_k_dense_replace: NonNegativeInt = 1
    norm_topk_prob: pydantic.StrictBool = True
    routed_scaling_factor: Positive = 1.0
    n_group: Size = 1
    topk_group: Size = 1


def period(layers: Sequence[object]) -> int:
    """After how many layers at the earliest they repeat, the last time perhaps in part."""
    return next(count for count in range(1, len(layers) + 1) if layers[count:] == layers[:-count])


class PatternedConfig(CommonConfig):
    """What is read of a `config.json` that declares which layers have a window."""

    sliding_window: Size | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    def pattern(self, sliding: LayerArgs, full: LayerArgs, full_every: int) -> tuple[LayerArgs, ...]:
        """The shortest pattern of these kinds of layers, of which `sliding` gets the window. Where the file does not
        list kinds, every `full_every`th layer is `full`. Raises a ValueError if it lists more or fewer than it has
        layers, or no window for them."""
        count = self.num_hidden_layers
        kinds = self.layer_types or [SLIDING if (n + 1) % full_every else FULL for n in range(count)]
        if len(kinds) != count:
            raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
        if SLIDING in kinds and self.sliding_window is None:
            raise ValueError("layers have the type sliding_attention, but sliding_window is missing")
        layers = [full if kind == FULL else replace(sliding, window=self.sliding_window) for kind in kinds]
        return tuple(layers[: period(layers)])


class RopeOfKindsConfig(PatternedConfig):
    """The same with a RoPE for each kind of layer, which transformers 5 writes as `rope_parameters`. In layers with a
    window it is not scaled."""

    sliding_rope: Rope | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rope_of_kinds(cls, values: Any) -> Any:
        rope = values.get("rope_parameters") if isinstance(values, dict) else None
        if isinstance(rope, dict) and (FULL in rope or SLIDING in rope):
            values = {**values, "rope_parameters": rope.get(FULL), "sliding_rope": rope.get(SLIDING)}
        return values

    @property
    def sliding_theta(self) -> float | None:
        """The base in layers with a window; None if the file has none. Raises a ValueError if it is scaled."""
        local = self.sliding_rope or Rope()
        if (local.model_extra or {}).get("rope_type", "default") != "default":
            raise ValueError("RoPE of sliding_attention is scaled, which is not supported")
        return local.rope_theta


def rope_of_kinds(args: TransformerArgs, sliding_theta: float) -> dict[str, Any]:
    """The entry `rope_parameters` for `RopeOfKindsConfig`."""
    full = {"rope_type": "default", **(published_scaling(args.rope_scaling) or {}), "rope_theta": args.rope_theta}
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": sliding_theta}}
