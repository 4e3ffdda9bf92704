"""What the `config.json` files of all families have in common (Hugging Face `transformers`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

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
"""Fields of sizes, and what `transformers` calls them."""


def published_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The entry `rope_scaling` of a `config.json`; the inverse of `read_scaling`."""
    if scaling is None:
        return None
    spellings = {key: spelling for spelling, key in reversed(SPELLINGS.items())}
    return {spellings.get(key, key): value for key, value in asdict(scaling).items() if value is not None}


class JsonEntries(pydantic.BaseModel):
    """The entries of a JSON file that are read. A null is the same as no entry."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}


def is_fixed(entry: FieldInfo) -> bool:
    """Whether an entry can have one value only, which is not null."""
    values = get_args(entry.annotation)
    return get_origin(entry.annotation) is Literal and len(values) == 1 and values != (None,)


class Rope(JsonEntries):
    """RoPE; further entries describe its scaling."""

    model_config = pydantic.ConfigDict(extra="allow")

    rope_theta: Theta | None = None
    partial_rotary_factor: float | None = None


class CommonConfig(JsonEntries):
    """The entries of a `config.json` that are read, and written. A literal is the only value that is supported, and is
    written, too.

    Attributes:
        ARGS: the family's sizes.
        MODEL_TYPE, ARCHITECTURE: what `transformers` calls the family, and its class of the model.
        ENTRIES: fields of the sizes, and their entries; `MOE`: those of `MoEArgs`, of which `MOE_FIXED` has what is the
            same for all models of the family.
        DEFAULT_THETA, DEFAULT_HEAD_DIM: of a file without these entries; None is hidden_size / num_attention_heads.
    """

    ARGS: ClassVar[type[TransformerArgs]]
    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    ENTRIES: ClassVar[Mapping[str, str]] = ENTRIES
    MOE: ClassVar[Mapping[str, str]] = {}
    MOE_FIXED: ClassVar[Mapping[str, Any]] = {}
    DEFAULT_THETA: ClassVar[float] = 10000.0
    DEFAULT_HEAD_DIM: ClassVar[int | None] = None

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
    def to_config(cls, args: Any) -> dict[str, Any]:
        """`config.json` of a model with these sizes. Raises a ValueError if it has no entry for one."""
        fixed = {name: get_args(field.annotation)[0] for name, field in cls.model_fields.items() if is_fixed(field)}
        share = {} if cls.ARGS.rope_share == 1 else {"partial_rotary_factor": cls.ARGS.rope_share}
        return {
            "architectures": [cls.ARCHITECTURE],
            "model_type": cls.MODEL_TYPE,
            **{entry: getattr(args, field) for field, entry in cls.ENTRIES.items()},
            **{entry: getattr(args.moe, field) for field, entry in cls.MOE.items()},
            "rope_scaling": published_scaling(args.rope_scaling),
            **share,
            **fixed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TransformerArgs:
        """The sizes in a `config.json`. Raises a ValueError if an entry is missing, wrong or not supported;
        `WrongModelType` if it is the type."""
        if config.get("model_type", cls.MODEL_TYPE) != cls.MODEL_TYPE:
            raise WrongModelType(f"model_type is {config['model_type']!r:.60}, not {cls.MODEL_TYPE!r}")
        read = cls.model_validate(config)
        for share in (read.rope.partial_rotary_factor, read.partial_rotary_factor):
            if share not in (None, cls.ARGS.rope_share):
                raise ValueError(f"partial_rotary_factor is {share}, but only {cls.ARGS.rope_share} is supported")
        if nested := [entry for entry, value in (read.rope.model_extra or {}).items() if isinstance(value, dict)]:
            raise ValueError(f"RoPE differs for {' and '.join(nested)}, which is not supported for {cls.MODEL_TYPE}")
        return cls.ARGS(**read.sizes)

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
        """Keyword arguments for `ARGS`. Raises a ValueError if it has no place for one."""
        head_dim = self.head_dim or self.DEFAULT_HEAD_DIM or self.hidden_size // self.num_attention_heads
        follows = self.ARGS.head_dim is TransformerArgs.head_dim
        if follows and head_dim * self.num_attention_heads != self.hidden_size:
            raise ValueError(f"head_dim is {self.head_dim}, but only hidden_size / num_attention_heads is supported")
        moe = {field: getattr(self, entry) for field, entry in self.MOE.items()}
        return {
            **{field: getattr(self, entry) for field, entry in self.ENTRIES.items() if field != "head_dim"},
            "n_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "rope_theta": self.rope.rope_theta or self.rope_theta or self.DEFAULT_THETA,
            "rope_scaling": self.scaling,
            **({"head_dim": head_dim} if "head_dim" in self.ARGS.__dataclass_fields__ else {}),
            **({"moe": MoEArgs(**moe, **self.MOE_FIXED)} if moe else {}),
        }


class GroupedMoEConfig(CommonConfig):
    """The mixtures of experts of DeepSeek-V3, and of families after it."""

    MOE: ClassVar[Mapping[str, str]] = {
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
    MOE_FIXED: ClassVar[Mapping[str, Any]] = {"score": "sigmoid"}

    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: NonNegativeInt = 1
    first_k_dense_replace: NonNegativeInt = 1
    norm_topk_prob: pydantic.StrictBool = True
    routed_scaling_factor: Positive = 1.0
    n_group: Size = 1
    topk_group: Size = 1

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `CommonConfig`; the file has no weights of layers that predict further tokens."""
        return super().to_config(args) | {"num_nextn_predict_layers": 0}


def period(layers: Sequence[object]) -> int:
    """After how many layers at the earliest they repeat, the last time perhaps in part."""
    return next(count for count in range(1, len(layers) + 1) if layers[count:] == layers[:-count])


class PatternedConfig(CommonConfig):
    """A `config.json` that declares which layers have a window. Where it does not list them, every `full_every`th layer
    is a `FULL_LAYER`, and the others are a `sliding_layer`."""

    FULL_LAYER: ClassVar[LayerArgs] = LayerArgs()

    sliding_window: Size | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    @property
    def full_every(self) -> int:
        raise NotImplementedError

    @property
    def sliding_layer(self) -> LayerArgs:
        """But for its window."""
        return LayerArgs()

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `CommonConfig`; windows that differ have no entry."""
        layers = [args.layer(number) for number in range(args.n_layers)]
        windows = {layer.window for layer in layers if layer.window is not None}
        if len(windows) > 1:
            raise ValueError(f"the published format has one window for all layers, not {sorted(windows)}")
        kinds = [FULL if layer.window is None else SLIDING for layer in layers]
        return super().to_config(args) | {"sliding_window": next(iter(windows), None), "layer_types": kinds}

    @property
    def sizes(self) -> dict[str, Any]:
        """As in `CommonConfig`, with the shortest pattern. Raises a ValueError if kinds are listed of more or fewer
        layers than there are, or without a window for them."""
        count = self.num_hidden_layers
        kinds = self.layer_types or [SLIDING if (n + 1) % self.full_every else FULL for n in range(count)]
        if len(kinds) != count:
            raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
        if SLIDING in kinds and self.sliding_window is None:
            raise ValueError("layers have the type sliding_attention, but sliding_window is missing")
        of_kinds = {FULL: self.FULL_LAYER, SLIDING: replace(self.sliding_layer, window=self.sliding_window)}
        layers = [of_kinds[kind] for kind in kinds]
        return super().sizes | {"pattern": tuple(layers[: period(layers)])}


class RopeOfKindsConfig(PatternedConfig):
    """The same with a RoPE for each kind of layer, which transformers 5 writes as `rope_parameters`. In layers with a
    window it is not scaled. From `rope_theta`, transformers 5 takes the base for one kind of layers only."""

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

    @property
    def sliding_layer(self) -> LayerArgs:
        return LayerArgs(rope_scaled=False)

    @classmethod
    def to_config(cls, args: Any) -> dict[str, Any]:
        """As in `PatternedConfig`; several bases of RoPE in layers with a window have no entry."""
        layers = [args.layer(number) for number in range(args.n_layers)]
        bases = {layer.rope_theta or args.rope_theta for layer in layers if layer.window is not None}
        if len(bases) > 1:
            raise ValueError(f"the published format has one base of RoPE for layers with a window, not {sorted(bases)}")
        full = {"rope_type": "default", **(published_scaling(args.rope_scaling) or {}), "rope_theta": args.rope_theta}
        sliding = {"rope_type": "default", "rope_theta": next(iter(bases), args.rope_theta)}
        return super().to_config(args) | {"rope_parameters": {FULL: full, SLIDING: sliding}}
