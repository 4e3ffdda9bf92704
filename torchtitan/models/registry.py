"""`MODELS`: maps `model.name` to what is needed to build and parallelize a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan.errors import ConfigError, nearest
from torchtitan.models.llama.args import LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2
from torchtitan.models.llama.model import Llama
from torchtitan.models.parallelize import SHARDING, parallelize
from torchtitan.parallel.dims import Style
from torchtitan.protocols import AttentionSpec, Decoder, ModelArgs
from torchtitan.registry import Registry, load

if TYPE_CHECKING:
    from torchtitan.models.naming import HuggingFaceNaming

AUTO = "auto"
"""`model.flavor` for the sizes of the model in `checkpoint.initial_load_path`."""


@dataclass(frozen=True)
class ModelSpec:
    """One family of models.

    Attributes:
        flavors: sizes by name: dataclasses with at least the attributes `n_layers`, `n_heads`, `n_kv_heads`,
            `head_dim`, `vocab_size` and the method `with_vocab_size` of `TransformerArgs`.
        build: from sizes to a module; called on the meta device. The module's forward takes (tokens, labels,
            document_ids) and returns the summed loss; `init_std(name)` gives each parameter's initial standard
            deviation. For pipelines it has the attributes that `parallel.pipeline.split_pipeline_stages` names.
        sharding: over tensor-parallel ranks, like `models.parallelize.SHARDING`.
        parallelize: like `models.parallelize.parallelize`.
        hf: names of the weights in other projects' checkpoints, or a row that names them; None if unknown.
    """

    flavors: Mapping[str, ModelArgs]
    build: Callable[[Any], Decoder] = Llama
    sharding: Mapping[str, Style] = field(default_factory=lambda: SHARDING)
    parallelize: Callable[..., None] = parallelize
    hf: "HuggingFaceNaming | str | None" = None

    def __post_init__(self) -> None:
        """Gives sizes that do not know of experts the attribute `moe`, and plain attention where they declare none."""
        for sizes in {type(args) for args in self.flavors.values()}:
            if not hasattr(sizes, "moe"):
                sizes.moe = None  # type: ignore[assignment]
            if not hasattr(sizes, "attention_spec"):
                sizes.attention_spec = lambda self, layer: AttentionSpec()  # type: ignore[method-assign]

    @property
    def naming(self) -> "HuggingFaceNaming | None":
        """What `hf` stands for."""
        return load(self.hf) if isinstance(self.hf, str) else self.hf

    def flavor(self, name: str, key: str = "model.flavor") -> ModelArgs:
        """The sizes called `name`, or a ConfigError that names the key and lists the known names."""
        if name not in self.flavors:
            known = list(self.flavors)
            raise ConfigError(
                f"{key}: unknown flavor {name!r}{nearest(name, known)}; known: {', '.join(known)}, and {AUTO}, which "
                "takes the sizes of the model in checkpoint.initial_load_path."
            )
        return self.flavors[name]


_LLAMA = "torchtitan.models.llama.hf:LLAMA_NAMING"
MODELS: Registry[ModelSpec] = Registry(
    "model",
    "model.name",
    {
        "llama2": ModelSpec(LLAMA2, hf=_LLAMA),
        "llama3": ModelSpec(LLAMA3, hf=_LLAMA),
        "llama3.1": ModelSpec(LLAMA3_1, hf=_LLAMA),
        "llama3.2": ModelSpec(LLAMA3_2, hf=_LLAMA),
        "qwen3": "torchtitan.models.qwen3:DENSE",
        "qwen3_moe": "torchtitan.models.qwen3:MIXTURE",
        "olmo3": "torchtitan.models.olmo3:FAMILY",
        "glm4_moe": "torchtitan.models.glm4_moe:FAMILY",
        "afmoe": "torchtitan.models.afmoe:FAMILY",
        "deepseek_v3": "torchtitan.models.deepseek_v3:FAMILY",
        "gemma3": "torchtitan.models.gemma3:FAMILY",
        "gpt_oss": "torchtitan.models.gpt_oss:FAMILY",
    },
)
