"""What the `config.json` files of all families have in common (Hugging Face `transformers`)."""

from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Ge, Le
from typing_extensions import Self

from torchtitan.models.args import TransformerArgs
from torchtitan.models.rope import Positive, RopeScaling, Size, Theta, published_scaling, read_scaling

ORIGINAL = "original_max_position_embeddings"


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


class Rope(JsonEntries):
    """RoPE; further entries describe its scaling."""

    model_config = pydantic.ConfigDict(extra="allow")

    rope_theta: Theta | None = None
    partial_rotary_factor: Annotated[float, Ge(1), Le(1)] = 1.0


class CommonConfig(JsonEntries):
    """What is read of every family's `config.json`. A literal is the only value that is supported."""

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

    @classmethod
    def read(cls, config: dict[str, Any], model_type: str) -> Self:
        """Raises a ValueError if an entry is missing, wrong or not supported; `WrongModelType` if it is the type."""
        if config.get("model_type", model_type) != model_type:
            raise WrongModelType(f"model_type is {config['model_type']!r:.60}, not {model_type!r}")
        return cls.model_validate(config)

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
            "rope_theta": self.rope.rope_theta or self.rope_theta or 10000.0,
            "rope_scaling": self.scaling,
        }
