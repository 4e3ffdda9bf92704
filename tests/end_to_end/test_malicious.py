"""A malicious checkpoint or tokenizer is refused: loading executes no code."""

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CHECKPOINTS, TINY, into, last_step, python, train_here
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from torchtitan.cache import private_folder
from torchtitan.checkpoint.manifest import MANIFEST, FileRecord, damage, write_manifest
from torchtitan.errors import CheckpointError, DataError
from torchtitan.files import sha256_of
from torchtitan.kernels import attention_cpu, pointwise

FLAGS = (*TINY, *CHECKPOINTS, "--training.steps=3")
WEIGHT = "tok_embeddings.weight"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    train_here(*FLAGS, into(folder), "--training.steps=2")
    return folder


@pytest.fixture
def checkpoint(two_steps: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two_steps, tmp_path / "run") / "checkpoint" / "step-2"


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def seal(checkpoint: Path) -> None:
    """Writes a matching manifest, as an attacker could."""
    files = {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in checkpoint.iterdir()}
    files.pop(MANIFEST)
    about = json.loads((checkpoint / MANIFEST).read_text())
    write_manifest(checkpoint, {key: about[key] for key in about.keys() - {"files", "sha256", "format"}}, files)


def metadata_that_runs_code(checkpoint: Path, mark: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(mark)))


def metadata_with_code_inside(checkpoint: Path, mark: Path) -> None:
    change(checkpoint, lambda metadata: setattr(metadata, "planner_data", Evil(mark)))


def attribute_of_a_class(checkpoint: Path, mark: Path) -> None:
    """`getattr` is allowed for members of one enum alone."""

    class Attribute:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (Metadata, "__init__")

    change(checkpoint, lambda metadata: setattr(metadata, "planner_data", Attribute()))


def tensor_that_is_a_pickle(checkpoint: Path, mark: Path) -> None:
    torch.save(Evil(mark), checkpoint / "__0_0.distcp")
    size = (checkpoint / "__0_0.distcp").stat().st_size

    def everything_from_there(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, size

    change(checkpoint, everything_from_there)


def entry_that_is_no_tensor(checkpoint: Path, mark: Path) -> None:
    tensor_that_is_a_pickle(checkpoint, mark)
    change(checkpoint, lambda metadata: metadata.state_dict_metadata.update({WEIGHT: BytesStorageMetadata()}))


def change(checkpoint: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    edit(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("way", ["resume", "initial_load_path"])
@pytest.mark.parametrize(
    "attack",
    [
        metadata_that_runs_code,
        metadata_with_code_inside,
        attribute_of_a_class,
        tensor_that_is_a_pickle,
        entry_that_is_no_tensor,
    ],
)
def test_no_code_is_run(attack: Callable[[Path, Path], None], way: str, checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    attack(checkpoint, mark)
    seal(checkpoint)
    assert damage(checkpoint) == []
    run = checkpoint.parents[1]
    flags = [into(run)] if way == "resume" else [into(tmp_path), f"--checkpoint.initial_load_path={checkpoint}"]
    with pytest.raises(CheckpointError, match=r"step-2 (cannot|could not) be loaded"):
        train_here(*FLAGS, *flags)
    assert not mark.exists()


@pytest.fixture
def attack_on_the_cache(tmp_path: Path) -> bytes:
    """The value of an entry, as opcodes, that makes pickle set `PurePosixPath.stem`. Where the cache of compiled
    kernels trusted paths, it then loaded a library that the attacker had put elsewhere, which creates a file."""
    assert (
        pointwise.applies_to(torch.ones(2, 16, dtype=torch.bfloat16)) and attention_cpu.float32_library()
    )  # so that the kernels are in the cache
    code = '#include <cstdio>\n__attribute__((constructor)) static void run() { fclose(fopen("%s", "w")); }\n'
    (tmp_path / "evil.cpp").write_text(code % (tmp_path / "it_ran"))
    library = tmp_path / "evil.lib"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "evil.cpp"], check=True)
    digest, folder = sha256_of(library)[:32], private_folder("kernels")
    for kernel in folder.glob("*.so"):
        shutil.copy(library, tmp_path / f"lib-{digest}-{kernel.stem.split('-')[1]}-0.so")
    stem = os.path.relpath(tmp_path / f"lib-{digest}", folder).encode()
    word = b"\x8c\x07pathlib\x8c\x09PosixPath\x93"  # or rather its base, as which it was read
    return word + b"N}\x8c\x04stemX" + len(stem).to_bytes(4, "little") + stem + b"s\x86b"


COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "train": lambda checkpoint, out: (
        *("train.py", *FLAGS, into(out), f"--checkpoint.initial_load_path={checkpoint}"),
    ),
    "generate": lambda checkpoint, out: (
        *(
            "-m",
            "torchtitan.tools.generate",
            "--checkpoint",
            checkpoint,
            "--prompt=a",
            "--max-new-tokens=1",
            "--custom-import=tiny",
        ),
    ),
    "evaluate": lambda checkpoint, out: (
        *("-m", "torchtitan.tools.evaluate", checkpoint, f"--tasks=text:{__file__}", "--custom-import=tiny"),
    ),
}


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(name, marks=pytest.mark.full) for name in ("generate", "evaluate"))]
)
def test_attributes_of_classes_are_not_set(
    command: str, checkpoint: Path, attack_on_the_cache: bytes, tmp_path: Path
) -> None:
    change(checkpoint, lambda metadata: setattr(metadata, "planner_data", "PLACEHOLDER"))
    before, after = (checkpoint / ".metadata").read_bytes().split(b"\x8c\x0bPLACEHOLDER")
    (checkpoint / ".metadata").write_bytes(before[:2] + before[11:] + attack_on_the_cache + after)  # without the frame
    seal(checkpoint)
    done = python(*COMMANDS[command](checkpoint, tmp_path / "out"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert ".metadata is refused: it " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("name", ["collections OrderedDict", "torch Size", "torch.serialization _get_layout"])
def test_torchs_weights_only_loading_sets_no_attributes_of_classes(name: str) -> None:
    """It reads the tensors of a checkpoint and Meta's files."""
    saved, attacked = BytesIO(), BytesIO()
    torch.save({}, saved)
    module, attribute = name.split()
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(attacked, "w") as out:
        for entry in archive.namelist():
            hostile = f"\x80\x02c{module}\n{attribute}\n".encode("latin1") + b"N}X\x04\0\0\0stemX\x04\0\0\0evils\x86b."
            out.writestr(entry, hostile if entry.endswith("data.pkl") else archive.read(entry))
    attacked.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Can only build"):
        torch.load(attacked, weights_only=True)


def test_metadata_are_read_as_each_python_pickles_an_enum(checkpoint: Path) -> None:
    class OfPython311(pickle.Pickler):
        """3.11.0 to 3.11.3, as in Debian 12."""

        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented

    pickled = BytesIO()
    OfPython311(pickled).dump(pickle.loads((checkpoint / ".metadata").read_bytes()))
    assert b"getattr" in pickled.getvalue()
    (checkpoint / ".metadata").write_bytes(pickled.getvalue())
    seal(checkpoint)
    train_here(*FLAGS, into(checkpoint.parents[1]))
    assert last_step(checkpoint.parents[1]) == 3


@pytest.mark.full
def test_no_command_imports_what_a_checkpoint_names(
    two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a module on the path nor one that lies in the checkpoint, and none without a word."""
    run = shutil.copytree(two_steps, tmp_path / "run")
    checkpoint, mark = run / "checkpoint" / "step-2", tmp_path / "it_ran"
    module = f"import dataclasses\nopen({str(mark)!r}, 'w').close()\n@dataclasses.dataclass\nclass JobConfig: ...\n"
    (tmp_path / "evil.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    configuration = manifest["configuration"]
    configuration["experimental"] = {"custom_import": "evil", "custom_args_module": "evil"}
    configuration["job"] |= {"dump_folder": str(run), "custom_config_module": "evil"}  # a key of other versions
    files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
    write_manifest(checkpoint, {"step": 2, "configuration": configuration}, files)
    text = (run / "config.toml").read_text().replace('custom_import = "tiny"', 'custom_import = "evil"')
    (run / "config.toml").write_text(text.replace('custom_args_module = ""', 'custom_args_module = "evil"'))
    assert text.count("evil") == 1
    (tmp_path / "text.txt").write_text("import os")
    tiny = "--custom-import=tiny"
    scripts = {
        "scripts/branch.py": (run, "--decay-steps=2", "--prepare-only", tiny),
        "torchtitan.tools.generate": ("--checkpoint", run, "--prompt=a", "--max-new-tokens=1", tiny),
        "torchtitan.tools.evaluate": (run, f"--tasks=text:{tmp_path / 'text.txt'}", tiny),
        "torchtitan.tools.convert": ("to-hf", run, tmp_path / "hf", tiny),
        "scripts/average_checkpoints.py": (run, "--out", tmp_path / "average", tiny),
        "torchtitan.tools.report": (run, "--output", tmp_path / "report.html"),
        "torchtitan.tools.explain": (*FLAGS, into(run), "--model.converters=int8"),
    }
    for name, arguments in scripts.items():
        command = (name,) if name.startswith("scripts") else ("-m", name)
        own = (
            ()
            if "--model" in str(arguments) or name in ("scripts/branch.py", "torchtitan.tools.report")
            else ("--custom-import=tiny",)
        )
        done = python(*command, *arguments, *own)
        refused = name == "scripts/branch.py"
        assert done.returncode == 2 * refused, done.stdout + done.stderr
        assert not refused or "add --experimental.custom_args_module=evil" in done.stderr
        assert not mark.exists(), name
    train_here(*FLAGS, into(run))
    train_here(*FLAGS, into(tmp_path / "other"), f"--checkpoint.initial_load_path={checkpoint}")
    assert not mark.exists()
    word = "--experimental.custom_args_module=evil"
    done = python("scripts/branch.py", run / "checkpoint" / "step-2", *scripts["scripts/branch.py"][1:], word)
    assert done.returncode == 0, done.stderr
    (branch,) = tmp_path.glob("*/branch.toml")
    assert "evil" not in branch.read_text() and word in done.stdout
    mark.unlink()  # the flag named the module
    train_here(f"--job.config_file={branch}", "--experimental.custom_import=tiny", "--training.steps=3")
    assert last_step(branch.parent) == 3
    shutil.copy(tmp_path / "evil.py", checkpoint)
    convert = ("-m", "torchtitan.tools.convert", "to-hf", checkpoint, *scripts["torchtitan.tools.convert"][2:])
    for attempt in (("scripts/branch.py", checkpoint, *scripts["scripts/branch.py"][1:]), convert):
        done = python(*attempt)
        assert done.returncode == 2 and "evil.py is not listed in manifest.json" in done.stderr
    assert not mark.exists()


def test_the_attack_is_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "it_ran")))
    assert (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname"])
def test_tensors_are_not_read_from_elsewhere(name: str, checkpoint: Path) -> None:
    shutil.copy(checkpoint / "__0_0.distcp", checkpoint.parents[2] / "secret")

    def lead_out(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    change(checkpoint, lead_out)
    seal(checkpoint)
    with pytest.raises(CheckpointError, match=r"points to .*which is not a file of the checkpoint"):
        train_here(*FLAGS, into(checkpoint.parents[1]))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    files = {file: FileRecord(**record) for file, record in manifest["files"].items()}
    write_manifest(checkpoint, {"step": 2}, {**files, name: FileRecord(Path(checkpoint / name).stat().st_size, "")})
    with pytest.raises(CheckpointError, match=r"manifest\.json lists .*not a file in the checkpoint"):
        train_here(*FLAGS, into(checkpoint.parents[1]))


def in_train_state(*keys: Any, value: Any) -> Callable[[Path], None]:
    def harm(checkpoint: Path) -> None:
        state = node = json.loads((checkpoint / "train_state.json").read_text())
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
        (checkpoint / "train_state.json").write_text(json.dumps(state))

    return harm


def with_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def harm(checkpoint: Path) -> None:
        change(checkpoint, lambda metadata: setattr(metadata.state_dict_metadata[WEIGHT].properties, "dtype", dtype))

    return harm


def without_chunks(checkpoint: Path) -> None:
    change(checkpoint, lambda metadata: metadata.state_dict_metadata[WEIGHT].chunks.clear())


def with_a_hole(checkpoint: Path) -> None:
    """Two chunks as large as the tensor, which share rows, so that others are in none."""

    def overlap(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[WEIGHT]
        rows, columns = entry.size
        half = torch.Size([rows // 2, columns])
        places = [torch.Size([first, 0]) for first in (0, rows // 4)]
        entry.chunks[:] = [ChunkStorageMetadata(offsets, half) for offsets in places]
        place = metadata.storage_data.pop(MetadataIndex(WEIGHT, torch.Size([0, 0])))
        metadata.storage_data |= {MetadataIndex(WEIGHT, offsets): place for offsets in places}

    change(checkpoint, overlap)


def without_positions(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "train_state.json").read_text())
    del state["dataloader"]
    (checkpoint / "train_state.json").write_text(json.dumps(state))


ROW = ("dataloader", "positions", "0")
WRONG = {
    "no positions": (without_positions, "train_state.json has no positions in the data"),
    "step": (in_train_state("step", value=50), "its step is 50, but the manifest's is 2"),
    "tokens_seen": (in_train_state("tokens_seen", value="many"), "tokens_seen is 'many'"),
    "seq_len": (in_train_state("seq_len", value="long"), "seq_len is 'long'"),
    "norms": (in_train_state("guard", "norms", value=["a"]), "could not convert string to float"),
    "positions": (in_train_state("dataloader", "positions", value=[]), "dataloader.positions is []"),
    "windows": (in_train_state(*ROW, "windows", value=-1), "dataloader.positions.0.windows is -1"),
    "many tokens": (in_train_state("tokens_seen", value=10**400), "tokens_seen is 1000"),
    "learning_rate": (in_train_state("learning_rate", value=math.nan), "learning_rate is nan"),
    "offset": (in_train_state(*ROW, "sources", 0, "used", value=-1), "used of a position is -1"),
    "tokens": (in_train_state(*ROW, "sources", 0, "tokens", value="x"), "tokens of a position is 'x'"),
    "offset in a list": (in_train_state(*ROW, "sources", 0, value=[[0, 1], 9, -1]), "used of a position is -1"),
    "short list": (in_train_state(*ROW, "sources", 0, value=[]), "not enough values"),
    "no fields": (in_train_state(*ROW, "sources", 0, value={}), "a position has nothing, not documents, tokens, used"),
    "field": (in_train_state(*ROW, "sources", 0, "unknown", value=1), "packed, unknown, not documents, tokens, used"),
    "documents": (in_train_state(*ROW, "sources", 0, "documents", value="x"), "a position is 'x'"),
    "place": (in_train_state(*ROW, "sources", 0, "documents", value=[0, None, 0]), "place of a position is None"),
    "turn": (in_train_state(*ROW, "sources", 0, "documents", value={"epoch": 0, "place": 8}), "has epoch, place, not"),
    "sources": (in_train_state(*ROW, "sources", value=[]), "positions in 0 sources, and the data are 1"),
    "int32": (with_dtype(torch.int32), f"{WEIGHT} is torch.int32 in the checkpoint and torch.float32 in this run"),
    "int64": (with_dtype(torch.int64), ".metadata is refused: its tensors have"),
    "bool": (with_dtype(torch.bool), f"{WEIGHT} is torch.bool in the checkpoint"),
    "chunks": (without_chunks, f"{WEIGHT} is incomplete"),
    "overlap": (with_a_hole, f"{WEIGHT} is incomplete"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_under_right_hashes_are_refused(case: str, checkpoint: Path) -> None:
    harm, message = WRONG[case]
    harm(checkpoint)
    seal(checkpoint)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        train_here(*FLAGS, into(checkpoint.parents[1]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_runs_no_code(save: Callable[[Any, Any], None], name: str, tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    with open(tmp_path / name, "wb") as file:
        save(Evil(mark), file)
    with pytest.raises(DataError, match=r"model\.tokenizer_path"):
        train_here(*TINY, into(tmp_path / "run"), f"--model.tokenizer_path={tmp_path / name}")
    assert not mark.exists()
