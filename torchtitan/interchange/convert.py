"""Converts checkpoints to published folders and back, in one process, one tensor at a time."""

import contextlib
import dataclasses
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan.checkpoint.files import Reader, TensorsOnlyPlanner, Writer, first_line, read_metadata
from torchtitan.checkpoint.folder import publish, saved_steps, step_folder, temporary_folder
from torchtitan.checkpoint.manifest import damage, read_manifest
from torchtitan.checkpoint.train_state import read_train_state
from torchtitan.config.extension import import_user_module
from torchtitan.errors import EXIT_STATUS, INTERRUPTED, CheckpointError, UserError
from torchtitan.interchange.model import PublishedModel, published
from torchtitan.interchange.sources import Source, find_source, longest_sequence, wrong_sums
from torchtitan.logging import Waiting
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.hf_config import WrongModelType
from torchtitan.protocols import ModelArgs


@contextlib.contextmanager
def one_process(custom_import: str | None) -> Iterator[None]:
    """Context for a script: a process group of one, the user's model families, and one-sentence errors."""
    try:
        if custom_import:
            import_user_module(custom_import, "--custom-import")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
    except (UserError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@dataclass(frozen=True)
class SavedModel:
    """The model in a checkpoint of this project.

    Attributes:
        checkpoint: its folder.
        spec: of its family.
        args: its sizes.
        tokenizer_path: as `model.tokenizer_path` of the run.
        seq_len: of the run.
        weight: reads one by its name.
    """

    checkpoint: Path
    spec: ModelSpec
    args: ModelArgs
    tokenizer_path: str | None
    seq_len: int
    weight: Callable[[str], torch.Tensor]

    def published(self) -> PublishedModel:
        """The published form of the model.

        Raises:
            CheckpointError: its family does not define one.
        """
        model = published(self.spec, self.args, self.tokenizer_path, self.seq_len)
        if model is None:
            raise CheckpointError(f"{self.checkpoint}: its model family has no published weight names (ModelSpec.hf).")
        return model


def saved_model(checkpoint: Path) -> SavedModel:
    """Opens the model in a checkpoint.

    Args:
        checkpoint: a step-N folder; or a run's dump folder, or its folder of checkpoints, of which the newest is used.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged.
    """
    if saved_steps(checkpoint / "checkpoint"):
        checkpoint = checkpoint / "checkpoint"
    if steps := saved_steps(checkpoint):
        checkpoint = step_folder(checkpoint, steps[-1])
    if found := damage(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of this program, or is damaged: {'; '.join(found[:3])}."
        )
    manifest = read_manifest(checkpoint)
    metadata = read_metadata(checkpoint, manifest.files)
    identity = read_train_state(checkpoint, manifest.step)["identity"]
    try:
        section, seq_len = manifest.configuration["model"], int(manifest.configuration["training"]["seq_len"])
        spec = MODELS.get(section["name"])
        args = TypeAdapter(type(next(iter(spec.flavors.values())))).validate_python(identity)
        tokenizer_path = section["tokenizer_path"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} does not record the model that it belongs to ({error!r}).") from None

    def weight(name: str) -> torch.Tensor:
        saved: TensorStorageMetadata = metadata.state_dict_metadata[name]  # type: ignore[assignment]  # a tensor
        tensors = {name: torch.empty(saved.size, dtype=saved.properties.dtype)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # `no_dist` says so
            dcp.load(tensors, storage_reader=Reader(checkpoint, metadata), planner=TensorsOnlyPlanner(), no_dist=True)
        return tensors[name]

    return SavedModel(checkpoint, spec, args, tokenizer_path, seq_len, weight)


class ReadWhenWritten(dcp.DefaultSavePlanner):
    """Writes the weights of a source, reading each one only when it is written.

    Args:
        source: of the weights; the state dict names them with empty tensors.
        zeros: shapes of tensors that the source does not have, float32.
    """

    def __init__(self, source: Source, zeros: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.source, self.zeros = source, zeros

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        name = index.fqn
        if name in self.zeros:
            return torch.zeros(self.zeros[name])
        return self.source.read(name, tuple(slice(0, size) for size in self.state_dict[name].shape)).contiguous()


def import_weights(folder: Path, out: Path, family: str | None, tokenizer_path: str | None) -> Path:
    """Creates a weights-only checkpoint, `out`/step-0, from a published folder. Returns its path.

    Args:
        family: `model.name` of the checkpoint; None takes the first family with a matching flavor.
        tokenizer_path: of the model; None: the one in the folder.

    Raises:
        CheckpointError: the folder is damaged, or its model is unknown here, or `out` contains checkpoints.
    """
    if found := wrong_sums(folder):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(found[:3])}.")
    if saved_steps(out):
        raise CheckpointError(f"{out} already holds checkpoints; choose another folder.")
    name, source = find_model(folder, family)
    spec = MODELS.get(name)
    assert source.args.vocab_size is not None  # a published model has one
    fitting = (
        flavor for flavor in spec.flavors if spec.flavor(flavor).with_vocab_size(source.args.vocab_size) == source.args
    )
    flavor = next(fitting, None)
    if flavor is None:
        raise CheckpointError(
            f"{folder} matches no flavor of {name}: it has {source.args}. Register one (docs/extension.md), and "
            "pass its module with --custom-import and its family with --family."
        )
    path = str(tokenizer_path or folder)
    model = published(spec, source.args, path, 0)
    assert model is not None  # checked by find_model
    model.check(source)
    tensors = {}
    for weight, shape in model.shapes.items():
        dtype = source.read(weight, tuple(slice(0, 0) for _ in shape)).dtype
        tensors[weight] = torch.empty(shape, dtype=dtype, device="meta")
    for weight, shape in model.unpublished.items():
        tensors[weight] = torch.empty(shape, device="meta")
    state = {"weights_only": True, "identity": dataclasses.asdict(source.args), "step": 0}
    about = {
        "versions": {"torch": torch.__version__},
        "configuration": {
            "model": {"name": name, "flavor": flavor, "tokenizer_path": path},
            "training": {"seq_len": longest_sequence(folder) or 0},
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    writer = Writer(temporary_folder(out, 0), lambda files: publish(out, 0, state, about, files))
    try:
        with Waiting(f"converting {folder}"):
            dcp.save(tensors, storage_writer=writer, planner=ReadWhenWritten(source, model.unpublished))
    except (CheckpointException, OSError, RuntimeError) as error:
        shutil.rmtree(temporary_folder(out, 0), ignore_errors=True)
        raise CheckpointError(f"{out} could not be written ({first_line(error)}).") from error
    return step_folder(out, 0)


def find_model(folder: Path, family: str | None = None) -> tuple[str, Source]:
    """The family of the model in a published folder: `family`, or the first with a flavor of these sizes, or else the
    first that supports such sizes.

    Raises:
        CheckpointError: there is none, or the folder is damaged.
    """
    possible: list[tuple[str, Source]] = []
    refusals = []
    for name in [family] if family else MODELS.names():
        spec = MODELS.get(name)
        if spec.hf is None and family is None:
            continue
        source = find_source(folder, spec.hf)
        if source is None:
            raise CheckpointError(f"{folder} holds neither config.json with safetensors nor consolidated.*.pth.")
        try:
            size = source.args.vocab_size
            assert size is not None  # a published model has one
        except CheckpointError as error:
            refusals.append(error)
            continue
        possible.append((name, source))
        if any(args.with_vocab_size(size) == source.args for args in spec.flavors.values()):
            return possible[-1]
    if not possible:
        of_its_family = (error for error in refusals if not isinstance(error.__cause__, WrongModelType))
        raise next(of_its_family, refusals[0])
    return possible[0]
