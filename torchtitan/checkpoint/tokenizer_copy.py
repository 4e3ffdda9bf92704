"""A copy of the tokenizer's files, in the dump folder of each run or beside checkpoints that belong to no run."""

from pathlib import Path

from torchtitan.data.tokenizer import BESIDE, OTHER_FILES, SHIPPED, find_file, main_folder
from torchtitan.files import is_remote, store_errors

COPY = "tokenizer_copy"  # name of the folder


def copy_tokenizer(path: str | None, folder: Path) -> None:
    """Replaces the tokenizer in `folder` by the one at `path` (a `model.tokenizer_path`), with the files beside it."""
    file = SHIPPED if path is None else find_file(path)
    if file.resolve().parent == folder.resolve():
        return
    is_json = file.read_bytes().lstrip()[:1] == b"{"
    usual = "tokenizer.json" if is_json else "tokenizer.model"
    files = {file.name if file.name in OTHER_FILES else usual: file}
    files |= {name: main_folder(file) / name for name in (BESIDE if file != SHIPPED else ())}
    with store_errors(folder):
        if not is_remote(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.model", "tokenizer.json", *OTHER_FILES, *BESIDE):
            (folder / name).unlink(missing_ok=True)
        for name, source in files.items():
            if source.is_file():
                (folder / name).write_bytes(source.read_bytes())
