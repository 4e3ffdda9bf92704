"""Folders of published weights, read one slice at a time."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from safetensors import SafetensorError, safe_open

from torchtitan.checkpoint.files import first_line
from torchtitan.checkpoint.manifest import inside, read_file, require_file
from torchtitan.checkpoint.others import TORCHTITAN, refuse_other_programs
from torchtitan.checkpoint.store import os_errors
from torchtitan.errors import CheckpointError
from torchtitan.files import sha256_of
from torchtitan.models.hf_config import WrongModelType
from torchtitan.models.naming import HuggingFaceNaming
from torchtitan.models.rope import Size
from torchtitan.parallel.sharded_tensors import Box
from torchtitan.protocols import ModelArgs
from torchtitan.strict_json import first_fault
from torchtitan.tools.interchange.packed import Fp8Slice, Mxfp4Slice, parts_of, whole_weights

INDEX = "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"  # before safetensors; still on the Hub
MODEL_CONFIG = "config.json"
PARAMS = "params.json"
SUMS = "SHA256SUMS"
SUM = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")  # the lines of `sha256sum`, "*" with --binary


def _is_plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a file claims must be in it: a tensor of stride 0 has any size."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("its numbers are not stored one after the other")
    return tensor


SIZE: pydantic.TypeAdapter[int] = pydantic.TypeAdapter(Size)
STORED = pydantic.TypeAdapter(
    dict[str, Annotated[torch.Tensor, pydantic.AfterValidator(_is_plain)]],
    config=pydantic.ConfigDict(arbitrary_types_allowed=True),
)
"""The content of a .pth file."""


class WeightSource(ABC):
    """Weights in a folder, by their names in this project. Raises a CheckpointError if a file is missing or damaged."""

    names: Collection[str]  # the folder's own names of its weights

    def __init__(self, folder: Path, naming: HuggingFaceNaming) -> None:
        self.folder, self.naming = folder, naming

    @property
    @abstractmethod
    def args(self) -> ModelArgs:
        """The model's sizes."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight with this name in this project; None if the folder lacks it."""

    @abstractmethod
    def _names_of(self, names: Iterable[str]) -> set[str]:
        """The folder's own names of these weights, and of what says the same again."""

    @abstractmethod
    def _read(self, name: str, box: Box) -> Any: ...

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """This part of a weight, or all of it, in its stored dtype. Raises a CheckpointError if it cannot be read."""
        try:
            tensor: torch.Tensor = self._read(name, box or tuple(slice(0, size) for size in self.shape(name) or ()))
            return tensor
        except (OSError, RuntimeError, ValueError, LookupError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({first_line(error)}).") from None

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name, tuple(slice(0, 0) for _ in self.shape(name) or ())).dtype

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The weights in the folder other than `names`, under the folder's own names."""
        others = set(self.names) - self._names_of(names)
        return sorted(name for name in others if not self.naming.ignores(name, self.args))


def find_source(folder: Path, naming: HuggingFaceNaming | None) -> WeightSource | None:
    """The weights in a folder; None if it has neither Hugging Face's nor Meta's format. Raises a CheckpointError if it
    cannot be read, the family has no published format, or another program wrote it that is not read here."""
    source_type: type[HuggingFaceFolder] | type[MetaFolder]
    with os_errors(f"{folder} cannot be read"):
        weights = any((folder / name).exists() for name in (INDEX, "model.safetensors", PICKLE, PICKLE_INDEX))
        if not weights:
            refuse_other_programs(folder, but=TORCHTITAN)
        if weights or (folder / MODEL_CONFIG).exists():
            source_type = HuggingFaceFolder
        elif (folder / PARAMS).exists() or any(folder.glob("consolidated.*.pth")):
            source_type = MetaFolder
        else:
            return None
    if naming is None:
        raise CheckpointError(f"{folder}: this model family has no published weight names (ModelSpec.hf).")
    return source_type(folder, naming)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises a CheckpointError if the file is missing or something else."""
    try:
        content = json.loads(read_file(path, follow_links=True))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return content
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}).") from None


def longest_sequence(folder: Path) -> int | None:
    """The tokens that the model sees at once, by its config.json; None if that does not say."""
    config = read_json(folder / MODEL_CONFIG) if (folder / MODEL_CONFIG).exists() else {}
    try:
        return SIZE.validate_python(config.get("max_position_embeddings"))
    except pydantic.ValidationError:
        return None


def args_in(path: Path, parse: Callable[[dict[str, Any]], ModelArgs]) -> ModelArgs:
    """The sizes in a JSON file. Raises a CheckpointError if it is missing, damaged, or of another family."""
    content = read_json(path)
    try:
        return parse(content)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path}: {first_fault(error)}.") from error
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the entry {error.args[0]}.") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {error}.") from error


def pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that torch.save wrote, by name: loading executes no code, and maps the file. Raises a
    CheckpointError if it is damaged."""
    try:
        require_file(path, follow_links=True)
        return STORED.validate_python(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path}: {first_fault(error)}.") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download all files of this model.") from None
    except Exception as error:  # any failure of a damaged or malicious pickle
        raise CheckpointError(f"{path} is damaged ({first_line(error)}); download it again.") from None


class Pickled:
    """A pytorch_model.bin, with the methods of `safe_open`."""

    def __init__(self, path: Path) -> None:
        self.tensors = pickled(path)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Any:
        return PickledSlice(self.tensors[name])


@dataclass(frozen=True)
class PickledSlice:
    """A tensor in a pytorch_model.bin, with the methods of `safe_open`'s slices."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, box: Any) -> torch.Tensor:
        return self.tensor[box]


class HuggingFaceFolder(WeightSource):
    """`config.json` and one or more safetensors files, as written by `save_pretrained` of `transformers`; or, if there
    are none, pytorch_model.bin files."""

    def __init__(self, folder: Path, naming: HuggingFaceNaming) -> None:
        super().__init__(folder, naming)
        self._files: dict[str, Any] = {}
        self._file_in = self._find()
        self.names = self._file_of = whole_weights(self._file_in)

    def _find(self) -> dict[str, str]:
        """The file of each weight."""
        choices = (INDEX, "model.safetensors", PICKLE_INDEX, PICKLE)
        chosen = next((name for name in choices if (self.folder / name).exists()), "model.safetensors")
        if chosen.endswith(".json"):
            listed = read_json(self.folder / chosen).get("weight_map")
            if not (isinstance(listed, dict) and all(isinstance(f, str) and inside(f) for f in listed.values())):
                raise CheckpointError(f"{self.folder / chosen} is damaged: its weight_map does not name files.")
        else:
            listed = dict.fromkeys(self._open(chosen).keys(), chosen)
        held = {file: set(self._open(file).keys()) for file in sorted(set(listed.values()))}
        for name, file in listed.items():
            if name not in held[file]:
                raise CheckpointError(f"{self.folder / file} lacks {name}, which {chosen} lists there.")
        return listed

    def _open(self, file: str) -> Any:
        """A file, as `safe_open` opens it."""
        if file not in self._files:
            path = self.folder / file
            if file.endswith(".bin"):
                return self._files.setdefault(file, Pickled(path))
            try:
                require_file(path, follow_links=True)
                self._files[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; download all files of this model.") from None
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged ({error}); download it again.") from None
        return self._files[file]

    @cached_property
    def args(self) -> ModelArgs:
        return args_in(self.folder / MODEL_CONFIG, self.naming.file.from_config)

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self.naming.name(name)
        if stored not in self._file_of:
            return None
        shape, parts = tuple(self._slice(stored).get_shape()), len(self.naming.parts(name))
        if shape and shape[-1] % parts == 0:
            shape = (*shape[:-1], shape[-1] // parts)
        if self.naming.is_transposed(name) and len(shape) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return (self._experts(name), *shape) if self.naming.stacks_experts(name) else shape

    def _experts(self, name: str) -> int:
        """How many experts of this stack there are, numbered from 0, with the same shape."""
        count, shape = 0, self._slice(self.naming.name(name)).get_shape()
        while (expert := self.naming.name(name, count)) in self._file_of and self._slice(expert).get_shape() == shape:
            count += 1
        return count

    def _names_of(self, names: Iterable[str]) -> set[str]:
        known = {stored for name in names for stored in self.naming.names_of(name, self.shape(name) or (1,))}
        if self.args.tied_embeddings and self._tied_twice():
            known.add(self.naming.name("output.weight"))
        return known

    def _tied_twice(self) -> bool:
        """Whether the output layer of a tied model is stored too, and equals the embedding."""
        names = (self.naming.name("output.weight"), self.naming.name("tok_embeddings.weight"))
        if not self._file_of.keys() >= set(names):
            return False
        output, embedding = map(self._slice, names)
        rows, columns = output.get_shape()
        places = ((slice(at, min(at + 4096, rows)), slice(0, columns)) for at in range(0, rows, 4096))
        return output.get_shape() == embedding.get_shape() and all(
            torch.equal(output[place], embedding[place]) for place in places
        )

    def _slice(self, name: str) -> Any:
        """A weight in a safetensors file; indexing reads only the slice."""
        first, *more = (self._open(self._file_in[part]).get_slice(part) for part in parts_of(name, self._file_in))
        if not more:
            return first
        return (Fp8Slice if name in self._file_in else Mxfp4Slice)(f"{self.folder}: {name}", first, *more)

    def _read(self, name: str, box: Box) -> Any:
        if self.naming.stacks_experts(name):
            numbers = range(box[0].start, box[0].stop)
            if not numbers:
                return self._slice(self.naming.name(name))[box[1:]][None][:0]
            return torch.stack([self._slice(self.naming.name(name, expert))[box[1:]] for expert in numbers])
        stored, parts = self._slice(self.naming.name(name)), self.naming.parts(name)
        if len(parts) > 1 or self.naming.is_transposed(name):
            return self._read_part(stored, box, parts.index(name), len(parts), self.naming.is_transposed(name))
        order = self.naming.rows_there(name, stored.get_shape()[0], self.args)
        if order is None or any(side.start >= side.stop for side in box):
            return stored[box]
        rows = order[box[0]]
        first, last = int(rows.min()), int(rows.max())
        return stored[(slice(first, last + 1), *box[1:])][rows - first]

    def _read_part(self, stored: Any, box: Box, part: int, parts: int, transposed: bool) -> Any:
        *outer, last = (*box[:-2], box[-1], box[-2]) if transposed else box
        taken = stored[(*outer, slice(last.start * parts, last.stop * parts))][..., part::parts]
        return taken.mT if transposed else taken


class MetaFolder(WeightSource):
    """`params.json` and `consolidated.*.pth`, one file per tensor-parallel rank at Meta. Loading is weights-only and
    memory-mapped: it executes no code, and reads only the requested slices."""

    def __init__(self, folder: Path, naming: HuggingFaceNaming) -> None:
        super().__init__(folder, naming)
        paths = sorted(folder.glob("consolidated.*.pth"))
        numbers = [path.name.split(".")[1] for path in paths]
        if numbers != [f"{number:02d}" for number in range(len(paths))] or not paths:
            raise CheckpointError(
                f"{folder}: expected consolidated.00.pth, consolidated.01.pth ..., but found the numbers {numbers}."
            )
        self._shards: list[Mapping[str, torch.Tensor]] = []
        for path in paths:
            weights = pickled(path)
            self._shards.append(weights)
            shapes, first = (
                {name: weight.shape for name, weight in shard.items()} for shard in (weights, self._shards[0])
            )
            if differing := shapes.items() ^ first.items():
                name = min(name for name, _ in differing)
                reason = f"{name} is in only one of them, or in another shape"
                raise CheckpointError(f"{path} and {paths[0].name} hold different weights: {reason}.")
        self.names = self._shards[0].keys()

    @cached_property
    def args(self) -> ModelArgs:
        return args_in(self.folder / PARAMS, self._args)

    def _args(self, params: dict[str, Any]) -> ModelArgs:
        if self.naming.from_params is None:
            raise WrongModelType("Meta has not released models of this family")
        embedding, output = (self._shards[0].get(f"{name}.weight") for name in ("tok_embeddings", "output"))
        if embedding is None or embedding.ndim != 2:
            raise CheckpointError(f"{self.folder}: its files hold no matrix tok_embeddings.weight.")
        # Llama 2 shards the embedding by columns, Llama 3 by rows.
        shards = len(self._shards) if embedding.shape[1] == params.get("dim") else 1
        args = self.naming.from_params(params, embedding.shape[0] * shards)
        # Llama 3.2's small models tie the embedding to the output layer, but params.json does not say so.
        return replace(args, tied_embeddings=output is None or torch.equal(output, embedding))

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._shards[0]:
            return None
        shape, dim = list(self._shards[0][name].shape), self._divided(name)
        if dim is not None:
            shape[dim] *= len(self._shards)
        return tuple(shape)

    def _divided(self, name: str) -> int | None:
        """The dimension along which the files shard a weight (Megatron's scheme)."""
        if len(self._shards) == 1 or self._shards[0][name].ndim < 2:
            return None
        if name == "tok_embeddings.weight":
            return 1 if self._shards[0][name].shape[1] != self.args.dim else 0
        return 1 if name.endswith(("wo.weight", "w2.weight")) else 0

    def _names_of(self, names: Iterable[str]) -> set[str]:
        return {*names, *(["output.weight"] if self.args.tied_embeddings else [])}

    def _read(self, name: str, box: Box) -> Any:
        dim = self._divided(name)
        if dim is None:
            return self._shards[0][name][box]
        pieces, before = [], 0  # rows or columns in the files before
        for weights in self._shards:
            start, stop = (max(end - before, 0) for end in (box[dim].start, box[dim].stop))
            pieces.append(weights[name][(*box[:dim], slice(start, stop), *box[dim + 1 :])])
            before += weights[name].shape[dim]
        return torch.cat(pieces, dim)


def wrong_sums(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """Files whose hash differs from `SHA256SUMS`, if the folder has it. Each of `world_size` ranks checks others."""
    try:
        # Not by `splitlines`, which also splits at U+2028 and others that a file's name may have.
        lines = [line.rstrip("\r") for line in read_file(folder / SUMS, follow_links=True).decode().split("\n")]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        return [f"{SUMS} cannot be read ({error})"]
    wrong = []
    for line in filter(str.strip, lines[rank::world_size]):
        sum = SUM.fullmatch(line)
        if sum is None or ".." in (name := Path(sum["name"])).parts or name.is_absolute():
            wrong.append(f"{SUMS} has the line {line!r:.60}, which is no SHA-256 of a file in the folder")
            continue
        try:
            require_file(folder / name, follow_links=True)
            if sha256_of(folder / name) != sum["digest"].lower():
                wrong.append(f"{name} has changed since it was written (its SHA-256 differs)")
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
    return wrong
