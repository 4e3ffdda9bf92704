"""Identifies the files that a run reads, without reading all of them: machines compare theirs before they train."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan.config.training import Training, Validation
from torchtitan.data.datasets import parse_entry
from torchtitan.data.file_versions import sample_of
from torchtitan.data.paths import files_in
from torchtitan.files import expand_data

MOST_READ = 1000  # files; of more, evenly spread ones are read, and of all others the sizes are compared


def fingerprints(training: Training, validation: Validation) -> dict[str, str]:
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
