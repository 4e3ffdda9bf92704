"""Exports a model as a folder that `transformers`, and tools built on it, can read."""

import functools
import itertools
import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.manifest import write_file
from torchtitan.checkpoint.state_dict import not_finite
from torchtitan.checkpoint.store import store_of, sync
from torchtitan.errors import CheckpointError, UserError
from torchtitan.files import is_remote, sha256_of
from torchtitan.logging import Waiting, logger
from torchtitan.parallel.object_collectives import all_gather_object, raise_on_all_ranks
from torchtitan.tools.interchange.model import PublishedModel
from torchtitan.tools.interchange.sources import INDEX, SUMS

LARGEST_FILE = 5 * 10**9  # bytes, as in `save_pretrained`
LARGEST_UNSPLIT = 10**9  # bytes; files below this size are not split further


def require_no_bias(biases: Iterable[torch.Tensor]) -> None:
    """Raises a CheckpointError unless the biases that balance experts, which are not published, are zero."""
    if any(bool(bias.any()) for bias in biases):
        raise CheckpointError(
            'the router of this model has biases that balance its experts (moe.balance = "bias"), which transformers '
            "lacks: the exported model would choose other experts. Train models for export with --moe.balance=loss."
        )


def export(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    weight: Callable[[str], torch.Tensor],
    model: PublishedModel,
    dtype: torch.dtype,
    largest_file: int = LARGEST_FILE,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the folder. All ranks call it. Ranks that shard the same weights gather them one at a time, and each holds
    the weights of its current file until the file is written. The folder gets its final name once everything is on
    disk.

    Args:
        folder: must not exist.
        shapes: of the weights that this rank has a shard of, by name.
        weight: returns one by its name: a DTensor if it is sharded.
        dtype: of the weights in the folder; biases of experts are float32.
        largest_file: bytes.
        group: in which ranks wait while others write, longer than a training step may take; None: the default.

    Raises a UserError on every rank if writing failed or the tokenizer is gone.
    """
    store = store_of(folder)
    temporary = store.staging(folder)
    on_rank_0 = dist.get_rank() == 0
    attempt = functools.partial(_attempt, folder, group)

    def begin() -> None:
        if store.exists(folder):
            raise CheckpointError(f"{folder} already exists; move it away.")
        store.begin(folder, lambda path: None)

    attempt(lambda: begin() if on_rank_0 else None)
    parts = {name: model.naming.parts(name) for name in model.shapes}  # what is published as one tensor
    firsts = [name for name in shapes if parts[name][0] == name]
    groups = _groups({name: sum(prod(shapes[part]) for part in parts[name]) * dtype.itemsize for name in firsts})
    rounds = [files for sizes, ranks in groups for files in _divide(sizes, ranks, largest_file)]
    count = sum(map(len, rounds))
    all_shapes = model.shapes
    numbers = itertools.count(1)
    index: dict[str, str] = {}
    sums: dict[str, str] = {}
    infinite = ""  # the first weight that cannot be written
    for files in Waiting.over(rounds, f"exporting to {folder}", "files"):
        own_file, content = "", {}
        for names, writer in files:
            file_name = f"model-{next(numbers):05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            for name in names:
                index |= dict.fromkeys(model.naming.names_of(name, all_shapes[name]), file_name)
                if name not in shapes:
                    continue  # belongs to another pipeline stage
                fulls = []
                for part in parts[name]:
                    full = weight(part).detach().to(model.dtype_of(part, dtype))
                    fulls.append(full.full_tensor() if isinstance(full, DTensor) else full)  # a collective of the stage
                    if not infinite and not fulls[-1].isfinite().all():
                        infinite = part
                if dist.get_rank() == writer:
                    own_file = file_name
                    stacked = model.naming.stacks_experts(name)
                    ours = zip(*(full.unbind() if stacked else [full] for full in fulls), strict=True)
                    for new_name, weights in zip(model.naming.names_of(name, fulls[0].shape), ours, strict=True):
                        new = model.naming.to_transformers(name, weights, model.args)
                        content[new_name] = new.cpu().contiguous()

        def write(infinite: str = infinite, content: dict[str, torch.Tensor] = content, file: str = own_file) -> None:
            if infinite:
                raise CheckpointError(f"{folder} is not written: {not_finite(infinite, dtype)}.")
            if content:
                sums[file] = _write(content, temporary / file)

        try:
            attempt(write)
        except UserError:
            if on_rank_0:
                store.give_up(folder)
            raise
    sums = dict(ChainMap(*all_gather_object(sums, group)))

    def finish() -> None:
        written = model.files(dtype)
        if count > 1:
            total = sum(sum(sizes.values()) for sizes, _ in groups)
            written[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2).encode()
        for name, text in written.items():
            sums[name] = write_file(temporary / name, text).sha256
        text = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()
        store.publish(folder, lambda staging: write_file(staging / SUMS, text))

    attempt(lambda: finish() if on_rank_0 else None)
    logger.info(f"exported the {model.weights} for Hugging Face transformers to {folder}")


def _groups(sizes: dict[str, int]) -> list[tuple[dict[str, int], list[int]]]:
    """The pipeline stages: sizes of a stage's weights, and the ranks that hold them."""
    of_ranks = all_gather_object(sizes)
    stages = [held for rank, held in enumerate(of_ranks) if held not in of_ranks[:rank]]
    return [(stage, [rank for rank, held in enumerate(of_ranks) if held == stage]) for stage in stages]


def _divide(sizes: dict[str, int], ranks: list[int], largest_file: int) -> list[list[tuple[list[str], int]]]:
    """Distributes the weights over as few files as the limits allow, in rounds in which each rank writes one file: for
    each, the names of its weights and the rank."""
    limit = min(largest_file, max(LARGEST_UNSPLIT, -(-sum(sizes.values()) // len(ranks))))
    contents: list[list[str]] = [[]]
    size = 0
    for name, more in sizes.items():
        if contents[-1] and size + more > limit:
            contents.append([])
            size = 0
        contents[-1].append(name)
        size += more
    files = list(zip(contents, itertools.cycle(ranks)))
    return [files[at : at + len(ranks)] for at in range(0, len(files), len(ranks))]


def _write(content: dict[str, torch.Tensor], path: Path) -> str:
    """Writes a safetensors file. Returns its SHA-256."""
    if is_remote(path):
        return write_file(path, save(content, metadata={"format": "pt"})).sha256
    path.touch()
    mode = path.stat().st_mode  # the umask's mode; safetensors makes its file readable to its owner alone
    save_file(content, path, metadata={"format": "pt"})
    path.chmod(mode)
    sync(path)
    return sha256_of(path)


def _attempt(folder: Path, group: dist.ProcessGroup | None, act: Callable[[], None]) -> None:
    """Runs `act` on this rank; the ranks wait for each other. Raises a UserError on every rank if it fails on any."""

    def attempt() -> None:
        try:
            act()
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{folder} could not be written ({reason}).") from None

    raise_on_all_ranks(attempt, group)
