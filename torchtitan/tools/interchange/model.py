"""Everything in a published folder except the weights."""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.checkpoint.files import INTERCHANGEABLE, first_line
from torchtitan.data.tokenizer import GENERATION, json_beside, load_tokenizer
from torchtitan.errors import CheckpointError
from torchtitan.logging import logger
from torchtitan.models.naming import LAYER_NUMBER, HuggingFaceNaming, declared
from torchtitan.models.registry import AUTO, ModelSpec
from torchtitan.protocols import Decoder, ModelArgs
from torchtitan.registry import deferred
from torchtitan.tools.interchange.sources import MODEL_CONFIG, WeightSource

_tokenizer_files: Callable[..., dict[str, bytes]] = deferred(
    "torchtitan.tools.interchange.tokenizer_files:tokenizer_files"
)


def require_layers(args: ModelArgs, names: Iterable[str], where: Path) -> None:
    """Call before a model is built of sizes that come from a file. Raises a CheckpointError if the weights beside it,
    with these `names`, are of fewer layers. `where` is the folder, for messages."""
    depth = len({number[0] for name in names if (number := LAYER_NUMBER.search(name))})
    if args.n_layers > depth:
        raise CheckpointError(
            f"{where} is said to have {args.n_layers:,} layers, but its files hold the weights of {depth:,}."
        )


def meta_model(build: Callable[[Any], Decoder], args: ModelArgs) -> Decoder:
    """The model, without memory for its weights. Raises a CheckpointError if there is no model of these sizes."""
    try:
        with torch.device("meta"):
            return build(args)
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"there is no model of the sizes {args} ({first_line(error)}).") from None


@dataclass(frozen=True)
class PublishedModel:
    """A model of this project in its published form."""

    naming: HuggingFaceNaming
    args: ModelArgs
    build: Callable[[Any], Decoder]
    tokenizer_path: str | None
    seq_len: int  # the longest sequence that the model was trained on; 0: not known
    add_bos: bool | None = None
    add_eos: bool = True
    changed: Collection[str] = ()  # fields of `args` that the run sets itself, unlike the folder it starts from
    weights: str = "trained weights"  # for people

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by name, regardless of their rank; with biases that balance experts, if the family
        publishes them."""
        return {
            name: tuple(tensor.shape)
            for name, tensor in self._tensors.items()
            if isinstance(tensor, nn.Parameter) or LAYER_NUMBER.sub("*", name) in self.naming.names
        }

    @cached_property
    def unpublished(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a checkpoint has and a published folder lacks: such biases, in other families."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items() if name not in self.shapes}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a tensor where weights have `dtype`: biases of experts stay float32."""
        tensor = self._tensors[name]
        return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = meta_model(self.build, self.args).state_dict(keep_vars=True)
        return tensors

    def check(self, source: WeightSource) -> None:
        """Raises a CheckpointError if a size, name, shape or dtype in the folder does not fit this model."""
        for field in dataclasses.fields(self.args):
            if declared(source.args, field.name) == declared(self.args, field.name):
                continue
            before, ours = getattr(source.args, field.name), getattr(self.args, field.name)
            if field.name in self.changed:
                logger.info(f"{field.name} is {ours} from here on; {source.folder} was trained with {before}")
            else:
                raise CheckpointError(
                    f"{source.folder} holds another model: its {field.name} is {before}, this run's is {ours}. "
                    f"Set the model.flavor (and model.tokenizer_path) that match it, or model.flavor = {AUTO}."
                )
        require_layers(source.args, source.names, source.folder)
        for name, shape in self.shapes.items():
            stored = source.shape(name)
            if stored is None:
                raise CheckpointError(f"{source.folder} lacks the weight {name} (its name in this program).")
            if stored != shape:
                raise CheckpointError(f"{source.folder}: {name} has shape {stored}, but {shape} in this run.")
            dtype = source.dtype(name)
            if dtype not in INTERCHANGEABLE:
                raise CheckpointError(
                    f"{source.folder}: {name} is {dtype}; only float32, bfloat16 and float16 can be loaded."
                )
        if unknown := source.unknown(self.shapes):
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise CheckpointError(
                f"{source.folder} holds {', '.join(unknown[:3])}{more}, which this model does not have."
            )

    def files(self, dtype: torch.dtype) -> dict[str, bytes]:
        """All files except the weights, which have `dtype`, by name."""
        tokenizer = load_tokenizer(self.tokenizer_path, self.add_bos, self.add_eos)
        try:
            config = self.naming.config(self.args)
        except ValueError as error:
            raise CheckpointError(f"the model cannot be exported: {str(error).removesuffix('.')}.") from None
        scaling = config.get("rope_scaling") or {}
        original = scaling.get("original_max_position_embeddings", 0)
        stops = [tokenizer.eos_id, *sorted(tokenizer.stop_ids - {tokenizer.eos_id})]
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": stops if len(stops) > 1 else tokenizer.eos_id}
        # After a run on short sequences, which need no scaling, the longest is still what the scaling is for. With YaRN
        # it always is: transformers before 4.56 takes the factor from the two lengths, whatever rope_scaling says.
        for_scaling = original and (self.seq_len <= original or scaling["rope_type"] == "yarn")
        longest = round(scaling["factor"] * original) if for_scaling else self.seq_len
        of_chat = json_beside(tokenizer.file, GENERATION)  # a run on conversations has left it there
        defaults = of_chat if of_chat.pop("torchtitan_chat", False) else {}
        config["torchtitan_weights"] = self.weights
        config |= {"torch_dtype": str(dtype)[6:], **ids, **({"max_position_embeddings": longest} if longest else {})}
        return {
            MODEL_CONFIG: json.dumps(config, indent=2).encode(),
            "generation_config.json": json.dumps({**defaults, **ids}, indent=2).encode(),
            **_tokenizer_files(self.tokenizer_path, self.add_bos, self.add_eos),
        }


def published(
    spec: ModelSpec, args: ModelArgs, tokenizer_path: str | None, seq_len: int, **rest: Any
) -> PublishedModel | None:
    """The published form of a model of these sizes; None if the family does not define its published weight names."""
    return (
        None if spec.naming is None else PublishedModel(spec.naming, args, spec.build, tokenizer_path, seq_len, **rest)
    )
