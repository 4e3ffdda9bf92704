"""Opens models for generation, from our checkpoints and from published folders."""

from pathlib import Path

import torch

from torchtitan.checkpoint.folder import saved_steps
from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan.errors import CheckpointError
from torchtitan.interchange.convert import find_model, saved_model
from torchtitan.interchange.load import load_weights
from torchtitan.interchange.model import published
from torchtitan.interchange.sources import wrong_sums
from torchtitan.models import MODELS, ModelSpec
from torchtitan.protocols import Decoder, ModelArgs


def open_model(
    path: Path, device: torch.device, dtype: torch.dtype, tokenizer_path: str | None = None
) -> tuple[Decoder, Tokenizer]:
    """A model with its weights, written under any layout, and its tokenizer.

    Args:
        path: a step-N folder, a folder of such folders, a run's dump folder, or a folder in Hugging Face's or Meta's
            format.
        tokenizer_path: as `model.tokenizer_path`; None takes the model's own.

    Raises:
        UserError: the folder is none of these, or is damaged, or its tokenizer is missing.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}.")
    if saved_steps(path / "checkpoint"):
        path = path / "checkpoint"
    if (path / MANIFEST).exists() or saved_steps(path):
        saved = saved_model(path)
        model = _empty(saved.spec, saved.args, device, dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved.weight(name))
        return model, load_tokenizer(tokenizer_path or saved.tokenizer_path)
    if found := wrong_sums(path):
        raise CheckpointError(f"{path} is damaged: {'; '.join(found[:3])}.")
    family, source = find_model(path)
    spec = MODELS.get(family)
    known = published(spec, source.args, None, 0)
    assert known is not None  # checked by find_model
    known.check(source)
    model = _empty(spec, source.args, device, dtype)
    load_weights(dict(model.named_parameters()), source)
    return model, load_tokenizer(tokenizer_path or str(path))


def _empty(spec: ModelSpec, args: ModelArgs, device: torch.device, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        model = spec.build(args)
    return model.to(dtype).to_empty(device=device).eval()
