"""Exports checkpoints, imports published folders, and averages checkpoints, in one process, one tensor at a time."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchtitan.checkpoint.choose import find_checkpoint, first_faults
from torchtitan.checkpoint.dcp_metadata import read_metadata
from torchtitan.checkpoint.files import CheckpointReader, TensorsOnlyPlanner, cause_of, differences, first_line
from torchtitan.checkpoint.folder import make_folder, run_steps, saved_steps, step_folder, step_writer
from torchtitan.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from torchtitan.checkpoint.others import refuse_other_programs
from torchtitan.checkpoint.state_dict import OPTIMIZER, names_not_finite, refuse_not_finite, without_mtp
from torchtitan.checkpoint.store import fetched_folder, store_of
from torchtitan.checkpoint.tokenizer import Identity, check_published_tokenizer, find_tokenizer, identity_of, same_ids
from torchtitan.checkpoint.tokenizer_copy import COPY, copy_tokenizer
from torchtitan.checkpoint.train_state import TrainState, read_train_state
from torchtitan.config import JobConfig
from torchtitan.config.extension import import_user_module
from torchtitan.config.fields import NonNegativeInt
from torchtitan.data.tokenizer import load_tokenizer
from torchtitan.errors import CheckpointError, ConfigError, DataError
from torchtitan.files import any_path, joined
from torchtitan.logging import Waiting
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.hf_config import WrongModelType
from torchtitan.models.registry import AUTO
from torchtitan.protocols import MTP, ModelArgs
from torchtitan.strict_json import first_fault
from torchtitan.tools.interchange.export import export, require_no_bias
from torchtitan.tools.interchange.model import PublishedModel, meta_model, published, require_layers
from torchtitan.tools.interchange.sources import (
    MODEL_CONFIG,
    WeightSource,
    args_in,
    find_source,
    longest_sequence,
    wrong_sums,
)


@contextlib.contextmanager
def one_process(custom_import: str | None = None) -> Iterator[None]:
    """Context for a script: the user's model families, and a process group of one."""
    if custom_import:
        import_user_module(custom_import, "--custom-import")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Model(pydantic.BaseModel):
    name: str
    tokenizer_path: str | None


class _Training(pydantic.BaseModel):
    seq_len: NonNegativeInt
    add_bos: bool | None = None
    add_eos: bool = True


class _Configuration(pydantic.BaseModel):
    """What is read of the configuration in a manifest."""

    model: _Model
    training: _Training


@dataclass(frozen=True)
class SavedModel:
    """The model in a checkpoint of this project."""

    checkpoint: Path
    manifest: Manifest
    run: _Configuration
    tensors: Metadata
    spec: ModelSpec
    args: ModelArgs
    tokenizer: Identity | None  # the run's; None: an old checkpoint
    seq_len: int  # the longest of the run's stages so far
    averages: Mapping[str, str]  # weight -> the moving average that is read instead

    @property
    def weights(self) -> str:
        """Which weights these are, for people."""
        average = self.manifest.average or {}
        moving = self.averages or average.get("ema")
        return f"{'mean of ' if average else ''}{'moving averages of the weights' if moving else 'trained weights'}"

    def weight(self, name: str) -> torch.Tensor:
        """A weight or buffer, read. Raises a CheckpointError if it cannot be read, or is not finite."""
        name = self.averages.get(name, name)
        saved: TensorStorageMetadata = self.tensors.state_dict_metadata[name]  # type: ignore[assignment]  # a tensor
        read = {name: torch.empty(saved.size, dtype=saved.properties.dtype)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it need not be initialized
                dcp.load(
                    read, storage_reader=CheckpointReader(self.checkpoint, self.tensors), planner=TensorsOnlyPlanner()
                )
        except (CheckpointException, OSError, RuntimeError, ValueError, LookupError) as error:
            raise CheckpointError(
                f"{self.checkpoint}: {name} cannot be read ({first_line(error)}). If a run has removed this checkpoint "
                "in the meantime (checkpoint.keep_latest_k), choose a newer one."
            ) from None
        refuse_not_finite(self.checkpoint, names_not_finite(read), "Choose an earlier one.")
        return read[name]

    @property
    def boundaries(self) -> dict[str, Any]:
        """`add_bos` and `add_eos` of the run."""
        return self.run.training.model_dump(include={"add_bos", "add_eos"})

    def tokenizer_path(self, given: str | None = None) -> str | None:
        """As `model.tokenizer_path`. Raises a UserError if `given` is another tokenizer, or the run's is gone."""
        if self.tokenizer is None:
            return given or self.run.model.tokenizer_path
        if given is None:
            return find_tokenizer(self.checkpoint, self.tokenizer, self.manifest.configuration)
        if not same_ids(identity_of(load_tokenizer(given)), self.tokenizer):
            raise CheckpointError(
                f"--tokenizer-path: {self.checkpoint} was made with another tokenizer than {given}; leave it out."
            )
        return given

    def published(self, tokenizer_path: str | None = None) -> PublishedModel:
        """The published form. Raises a CheckpointError if the family does not define one, or the tokenizer is gone."""
        path = self.tokenizer_path(tokenizer_path)
        model = published(self.spec, self.args, path, self.seq_len, **self.boundaries)
        if model is None:
            raise CheckpointError(f"{self.checkpoint}: its model family has no published weight names (ModelSpec.hf).")
        return dataclasses.replace(model, weights=self.weights)


def saved_model(path: Path, ema: bool = False) -> SavedModel:
    """The model in the checkpoint that `find_checkpoint` finds at `path`; with `ema`, its moving averages
    (`optimizer.ema_decay`). Raises a CheckpointError if there is none, or it is damaged, or its model is not known."""
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a step-N folder, or the dump folder of a run.")
    return open_checkpoint(checkpoint, ema)


def open_checkpoint(checkpoint: Path, ema: bool = False) -> SavedModel:
    """As `saved_model`, for a checkpoint that `find_checkpoint` has verified."""
    try:
        manifest = read_manifest(checkpoint)
        tensors = read_metadata(checkpoint, manifest.files)
        saved = read_train_state(checkpoint, manifest.step)
        run = _Configuration.model_validate(manifest.configuration)
        seq_len = run.training.seq_len if saved.seq_len is None else saved.seq_len
        if run.model.name not in MODELS.names():
            raise CheckpointError(
                f"its model family, {run.model.name!r}, is not known here; name the module that registers it with "
                "--custom-import"
            )
        spec = MODELS.get(run.model.name)
        args = recorded_args(saved.identity, spec)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{checkpoint} does not record its model: {first_fault(error)}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}.") from None
    names = [name for name in tensors.state_dict_metadata if not name.startswith(OPTIMIZER)]
    names = without_mtp(names, checkpoint)
    require_layers(args, names, checkpoint)
    state = meta_model(spec.build, args).state_dict()
    unknown = [f"{name} is not in the model" for name in names if name not in state]
    if faults := differences(tensors, state) + unknown:
        raise CheckpointError(f"{checkpoint} does not hold the model that it records: {first_faults(faults)}.")
    averages = averages_of(checkpoint, tensors) if ema else {}
    return SavedModel(checkpoint, manifest, run, tensors, spec, args, saved.tokenizer, seq_len, averages)


def averages_of(checkpoint: Path, tensors: Metadata) -> dict[str, str]:
    """The name of each trained weight's moving average; buffers have none. Raises a CheckpointError if one lacks it."""
    saved, state = tensors.state_dict_metadata, f"{OPTIMIZER}state."
    trained = {key.removeprefix(state).rpartition(".")[0] for key in saved if key.startswith(state)} & saved.keys()
    averages = {name: f"{state}{name}.ema" for name in trained}
    if not averages or any(getattr(saved.get(key), "size", None) != saved[name].size for name, key in averages.items()):  # type: ignore[union-attr]
        raise CheckpointError(f"{checkpoint} has no moving average; it takes a run with optimizer.ema_decay.")
    return averages


def sizes_from_files(config: JobConfig, spec: ModelSpec) -> ModelArgs:
    """The sizes of the model in the run's own newest checkpoint, from which it resumes, or else in `initial_load_path`,
    which may be gone. Raises a UserError if there are none."""
    folder = joined(Path(config.job.dump_folder), config.checkpoint.folder)
    for step in reversed(run_steps(folder) if config.checkpoint.enable_checkpoint else []):
        with contextlib.suppress(CheckpointError):  # a damaged one is reported when the run resumes
            return sizes_in(step_folder(folder, step), spec)
    path = config.checkpoint.initial_load_path
    if path is None:
        raise ConfigError(
            f"model.flavor = {AUTO} takes the sizes of the model in checkpoint.initial_load_path, which is not set."
        )
    return sizes_in(any_path(path), spec)


def sizes_in(folder: Path, spec: ModelSpec) -> ModelArgs:
    """The sizes of the model in a published folder or a checkpoint, perhaps without its weights. Raises a
    CheckpointError if the folder does not exist or says no sizes, or they are of another family."""
    folder = fetched_folder(folder)
    if (folder / MANIFEST).exists():
        try:
            identity = read_train_state(folder, read_manifest(folder).step).identity
            return recorded_args(identity, spec)
        except CheckpointError as error:
            raise CheckpointError(f"{folder} cannot be read: {error}.") from None
    if spec.naming is not None and (folder / MODEL_CONFIG).exists():
        return args_in(folder / MODEL_CONFIG, spec.naming.file.from_config)
    source = find_source(folder, spec.naming)
    if source is None:
        refuse_other_programs(folder)
        raise CheckpointError(f"{folder} holds neither a checkpoint nor config.json nor params.json.")
    return source.args


def recorded_args(identity: dict[str, Any] | None, spec: ModelSpec) -> ModelArgs:
    """The sizes that a checkpoint records. Raises a CheckpointError, with only the reason, if of another family."""
    try:
        return pydantic.TypeAdapter(type(next(iter(spec.flavors.values())))).validate_python(identity)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"it does not record the sizes of a model of its family ({first_fault(error)})") from None


def import_weights(folder: Path, out: Path, family: str | None, tokenizer_path: str | None) -> Path:
    """Creates a weights-only checkpoint, `out`/step-0, from a published folder. Returns its path.

    Args:
        family: `model.name` of the checkpoint; None takes the first family with a matching flavor.
        tokenizer_path: of the model; None: the one in the folder.

    Raises a CheckpointError if the folder is damaged, its model is of no family here, or `out` contains checkpoints.
    """
    _require_no_checkpoints(out)
    name, source = find_model(folder, family)
    spec = MODELS.get(name)
    flavor = _flavor_of(spec, source.args) or AUTO
    path = str(tokenizer_path or folder)
    model = published(spec, source.args, path, 0)
    assert model is not None  # checked by find_model
    model.check(source)
    shapes = {**model.shapes, **model.unpublished}
    dtypes = {weight: model.dtype_of(weight, source.dtype(weight)) for weight in model.shapes}
    dtypes |= dict.fromkeys(model.unpublished, torch.float32)
    tokenizer = None
    with contextlib.suppress(DataError) if tokenizer_path is None else contextlib.nullcontext():
        tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        check_published_tokenizer(folder, tokenizer, source.args.vocab_size, "--tokenizer-path", ", or leave it out")
    configuration: dict[str, Any] = {
        "model": {"name": name, "flavor": flavor, "tokenizer_path": path},
        "training": {"seq_len": longest_sequence(folder) or 0},
    }
    tensors = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}

    def weight(name: str) -> torch.Tensor:
        if name in model.unpublished:
            return torch.zeros(shapes[name])
        if names_not_finite({name: (read := source.read(name).contiguous())}):  # then which others, too
            bad = [each for each in model.shapes if names_not_finite({each: source.read(each)})]
            refuse_not_finite(folder, bad, "Download it again, or ask who made it.")
        return read.to(dtypes[name])

    identity = None if tokenizer is None else identity_of(tokenizer)
    about = {"configuration": configuration}
    seq_len = configuration["training"]["seq_len"]
    return _save(out, 0, seq_len, source.args, identity, path, about, tensors, weight, f"importing {folder}")


def export_weights(checkpoint: Path, out: Path, dtype: str, tokenizer_path: str | None, ema: bool) -> str:
    """Creates the published folder `out` of a checkpoint. Returns what was exported: "the weights of FOLDER"."""
    saved = saved_model(checkpoint, ema)
    model = saved.published(tokenizer_path)
    require_no_bias(saved.weight(name) for name in model.unpublished)
    export(out, model.shapes, saved.weight, model, getattr(torch, dtype))
    further = any(name.startswith(MTP) for name in saved.tensors.state_dict_metadata)
    left_out = ", without its layers of multi-token prediction," if further else ""
    return f"the {model.weights} of {saved.checkpoint}{left_out}"


def average(checkpoints: Sequence[Path], out: Path, ema: bool = False) -> Path:
    """Creates a weights-only checkpoint, `out`/step-N, with the mean of each weight, in float32: sums are in float64,
    so it is the exact mean, rounded once. Its step is the last one's. Returns its path.

    `checkpoints` are as for `saved_model`; with `ema`, their moving averages are averaged. Raises a CheckpointError if
    one is damaged, or of another model, or has no moving average; or `out` contains checkpoints.
    """
    _require_no_checkpoints(out)
    models = [saved_model(path, ema) for path in checkpoints]
    first = models[0]
    for model in models[1:]:
        if model.args != first.args:
            raise CheckpointError(f"{model.checkpoint} is of another model than {first.checkpoint}.")
        if model.tokenizer and first.tokenizer and not same_ids(model.tokenizer, first.tokenizer):
            raise CheckpointError(f"{model.checkpoint} was made with another tokenizer than {first.checkpoint}.")
    weights = {
        name: torch.empty(saved.size, dtype=torch.float32, device="meta")  # type: ignore[union-attr]  # a tensor
        for name, saved in first.tensors.state_dict_metadata.items()
        if not name.startswith(OPTIMIZER)
    }

    def mean(name: str) -> torch.Tensor:
        total = torch.zeros(weights[name].shape, dtype=torch.float64)
        for model in models:
            total += model.weight(name)
        return (total / len(models)).float()

    step = max(model.manifest.step for model in models)
    about = {
        "configuration": first.manifest.configuration,
        "average": {"of": [str(model.checkpoint) for model in models], "ema": ema},
    }
    path = first.tokenizer_path() if first.tokenizer else None
    seq_len = max(model.seq_len for model in models)
    return _save(out, step, seq_len, first.args, first.tokenizer, path, about, weights, mean, "averaging")


def _require_no_checkpoints(out: Path) -> None:
    if saved_steps(out):
        raise CheckpointError(f"{out} already holds checkpoints; choose another folder.")


class _ReadWhenWritten(dcp.DefaultSavePlanner):
    """Writes tensors that the state dict only names, getting each one from `weight` when it is written."""

    def __init__(self, weight: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._weight = weight

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._weight(index.fqn)


def _save(
    out: Path,
    step: int,
    seq_len: int,
    args: ModelArgs,
    tokenizer: Identity | None,
    tokenizer_path: str | None,
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    weight: Callable[[str], torch.Tensor],
    title: str,
) -> Path:
    """Writes the weights-only checkpoint `out`/step-N, from one process. Returns its path. `seq_len` is the longest
    sequence that the weights were trained on, 0 if not known. `about` is for the manifest,
    `title` for whoever waits. `tensors` have sizes and dtypes; `weight` returns one by its name."""
    state = TrainState(weights_only=True, identity=dataclasses.asdict(args), step=step, seq_len=seq_len)
    if tokenizer is not None:
        state.tokenizer = dict(tokenizer)
        copy_tokenizer(tokenizer_path, out / COPY)
    checkpoint = step_folder(out, step)
    writer = step_writer(out, step, state.to_json(), {"versions": {"torch": torch.__version__}, **about})
    try:
        make_folder(out)
        with Waiting(title):
            dcp.save(dict(tensors), storage_writer=writer, planner=_ReadWhenWritten(weight))
    except (CheckpointException, OSError, RuntimeError) as error:
        store_of(out).give_up(checkpoint)
        if isinstance(cause := cause_of(error), CheckpointError):  # about what was read
            raise cause from None
        raise CheckpointError(f"{out} could not be written ({first_line(error)}).") from error
    return checkpoint


def _flavor_of(spec: ModelSpec, args: ModelArgs) -> str | None:
    """The first flavor with these sizes; None if there is none."""
    assert args.vocab_size is not None  # a published model has one
    size = args.vocab_size
    return next((name for name, flavor in spec.flavors.items() if flavor.with_vocab_size(size) == args), None)


def find_model(folder: Path, family: str | None = None) -> tuple[str, WeightSource]:
    """The family of the model in a published folder: `family`, or the first with a flavor of these sizes, or else the
    first that supports such sizes. Raises a CheckpointError if there is none, or the folder is damaged or missing."""
    folder = fetched_folder(folder)
    if wrong := wrong_sums(folder):
        raise CheckpointError(f"{folder} is damaged: {first_faults(wrong)}.")
    possible: list[tuple[str, WeightSource]] = []
    refusals = []
    for name in [family] if family else MODELS.names():
        spec = MODELS.get(name)
        if spec.naming is None and family is None:
            continue
        source = find_source(folder, spec.naming)
        if source is None:
            refuse_other_programs(folder)
            raise CheckpointError(f"{folder} holds neither config.json with safetensors nor consolidated.*.pth.")
        try:
            flavor = _flavor_of(spec, source.args)
        except CheckpointError as error:
            refusals.append(error)
            continue
        if flavor is not None:
            return name, source
        possible.append((name, source))
    if not possible:
        of_its_family = (error for error in refusals if not isinstance(error.__cause__, WrongModelType))
        raise next(of_its_family, refusals[0])
    return possible[0]
