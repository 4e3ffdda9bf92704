"""Opens models for generation and evaluation, from our checkpoints and from published folders."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtitan.checkpoint.choose import find_checkpoint
from torchtitan.checkpoint.tokenizer import check_published_tokenizer
from torchtitan.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan.errors import CheckpointError, DataError
from torchtitan.kernels.cpu_speed import bfloat16_is_fast
from torchtitan.logging import Waiting
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.moe import reset_buffers
from torchtitan.protocols import Decoder, ModelArgs
from torchtitan.tools.interchange.convert import find_model, open_checkpoint
from torchtitan.tools.interchange.exchange import load_weights
from torchtitan.tools.interchange.model import meta_model, published
from torchtitan.tools.interchange.sources import longest_sequence


class OpenedModel(NamedTuple):
    """A model with its weights, in this process as a whole."""

    model: Decoder
    tokenizer: Tokenizer
    seq_len: int | None  # the longest sequence that it was trained on; None if unknown
    step: int  # the step of the run that trained it; 0 if unknown
    folder: Path  # that it was read from
    weights: str  # names them for people


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype with this name; for "auto" the one that the device multiplies faster."""
    if name == "auto":
        name = "bfloat16" if device.type != "cpu" or bfloat16_is_fast() else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def open_model(
    path: Path, device: torch.device, dtype: torch.dtype, tokenizer_path: str | None = None, ema: bool = False
) -> OpenedModel:
    """A model with its weights, written under any layout, and its tokenizer.

    Args:
        path: a step-N folder, a folder of such folders, a run's dump folder, or a folder in Hugging Face's or Meta's
            format.
        tokenizer_path: as `model.tokenizer_path`; None takes the model's own.
        ema: take the moving averages of the weights (`--ema`).

    Raises a UserError if the folder is none of these, or is damaged, or has no moving averages, or its tokenizer is
    missing or has too many ids.
    """
    if (checkpoint := find_checkpoint(path)) is not None:
        saved = open_checkpoint(checkpoint, ema)
        model = _empty(saved.spec, saved.args, device, dtype)
        with torch.no_grad():
            for name, tensor in Waiting.over(list(model.state_dict().items()), "loading the model", "weights"):
                tensor.copy_(saved.weight(name))
        tokenizer = _tokenizer(saved.tokenizer_path(tokenizer_path), **saved.boundaries)
        _require_embeddings(tokenizer, saved.args)
        return OpenedModel(model, tokenizer, saved.seq_len or None, saved.manifest.step, checkpoint, saved.weights)
    if ema:
        raise CheckpointError(f"--ema: {path} is no checkpoint of this program, which alone hold moving averages.")
    family, source = find_model(path)
    spec = MODELS.get(family)
    known = published(spec, source.args, None, 0)
    assert known is not None  # checked by find_model
    known.check(source)
    model = _empty(spec, source.args, device, dtype)
    load_weights(dict(model.named_parameters()), source)
    tokenizer = _tokenizer(tokenizer_path or str(path))
    if tokenizer_path:
        check_published_tokenizer(path, tokenizer, source.args.vocab_size, "--tokenizer-path", ", or leave it out")
    _require_embeddings(tokenizer, source.args)
    return OpenedModel(model, tokenizer, longest_sequence(path), 0, path, "weights as exported")


def _tokenizer(path: str | None, **boundaries: Any) -> Tokenizer:
    """The tokenizer; messages name the flag of the commands that call this."""
    try:
        return load_tokenizer(path, **boundaries)
    except DataError as error:
        message = str(error).replace("model.tokenizer_path, or none for the shipped tokenizer", "model.tokenizer_path")
        raise DataError(message.replace("model.tokenizer_path", "--tokenizer-path")) from None


def _require_embeddings(tokenizer: Tokenizer, args: ModelArgs) -> None:
    if args.vocab_size is not None and tokenizer.vocab_size > args.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model only {args.vocab_size:,} embeddings; use "
            "the tokenizer that the model was trained with."
        )


def _empty(spec: ModelSpec, args: ModelArgs, device: torch.device, dtype: torch.dtype) -> Decoder:
    model = meta_model(spec.build, args)
    for parameter in model.parameters():  # not buffers: the biases of experts are float32
        parameter.data = parameter.data.to(dtype)
    model = model.to_empty(device=device).eval()
    reset_buffers(model)
    return model
