"""What the machines of a run must agree on: its configuration, files and folders."""

import dataclasses
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.config import JobConfig
from torchtitan.config.compare import flat
from torchtitan.config.training import Training, Validation
from torchtitan.data import Tokenizer
from torchtitan.data.datasets import parse_entry
from torchtitan.data.paths import files_in
from torchtitan.data.sources import sample_of
from torchtitan.errors import ConfigError
from torchtitan.files import expand_data, is_remote, joined
from torchtitan.launcher.folder_lock import FolderLock
from torchtitan.logging import logger
from torchtitan.parallel.object_collectives import refuse_differences
from torchtitan.world import world

MOST_READ = 1000  # files; of more, evenly spread ones are read, and of all others the sizes are compared


def refuse_other_machines(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Raises a ConfigError if machines have different configurations or files."""
    refuse_differences(_keys(config), "start all machines with the same configuration")
    files = {
        **_fingerprints(config.training, config.validation),
        "model.tokenizer_path": tokenizer.fingerprint,
    }
    of_machine = files if world().local_rank == 0 else {}
    refuse_differences(of_machine, "copy the same files to all machines")


def check_folders(config: JobConfig, tokens: dict[str, str]) -> None:
    """Raises a ConfigError if this rank does not see the folders that rank 0 has locked: its part of a checkpoint would
    be written elsewhere. Without checkpoints each machine may have its own."""
    dump_folder = Path(config.job.dump_folder)
    folders = {"job.dump_folder": dump_folder, "checkpoint.folder": joined(dump_folder, config.checkpoint.folder)}
    for key, token in tokens.items() if dist.get_rank() > 0 else ():
        if not FolderLock(folders[key], key).sees(token):
            problem = (
                f"{key}: {folders[key]} on {platform.node()} (rank {dist.get_rank()}) is not the folder that rank 0 "
                "writes to; choose one on storage that all machines share."
            )
            # Machines need not share a disk if checkpoints are in an object store.
            if config.checkpoint.enable_checkpoint and not (
                key == "job.dump_folder" and is_remote(folders["checkpoint.folder"])
            ):
                raise ConfigError(problem)
            logger.warning(problem)


def _keys(config: JobConfig) -> dict[str, Any]:
    """The keys that all machines must agree on: not where files lie."""
    values = flat({name: section for name, section in dataclasses.asdict(config).items() if name != "job"})
    places = {key for key, value in values.items() if key.endswith(("path", "folder")) and not isinstance(value, bool)}
    return {key: value for key, value in values.items() if key not in places}


def _fingerprints(training: Training, validation: Validation) -> dict[str, str]:
    """Key and name of each data file in a file system -> its size and a hash of parts of its content."""
    files = [*_files(training, validation)]
    every = -(-len(files) // MOST_READ) or 1
    with ThreadPoolExecutor(16) as threads:
        marks = threads.map(_mark, [path for _, path in files], [number % every == 0 for number in range(len(files))])
        return dict(zip([name for name, _ in files], marks, strict=True))


def _files(training: Training, validation: Validation) -> Iterator[tuple[str, Path]]:
    mixture = [("training.dataset_mixture", parse_entry(entry)[0]) for entry in training.dataset_mixture]
    single = [] if mixture else [("training.dataset_path", training.dataset_path)]
    for key, text in (*mixture, *single, ("validation.dataset_path", validation.dataset_path)):
        place = Path(expand_data(text or ""))  # what is in an object store is the same for all machines
        if text and place.is_file():
            yield f"{key}: {place.name}", place
        elif text and place.is_dir():
            yield from ((f"{key}: {name}", place / name) for name in files_in(place))


def _mark(path: Path, read: bool) -> str:
    try:
        return f"{path.stat().st_size:,} bytes" + (f", hash {sample_of(path)[:8]}" if read else "")
    except OSError as error:
        return f"{error.strerror}"
