"""Published folders and checkpoints with wrong or hostile content: one sentence, in bounded time and memory."""

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from data_helpers import TOKENIZER, write_megatron
from safetensors.torch import load_file, save_file
from tiny import nontrivial, nontrivial_llama

from torchtitan.checkpoint.folder import step_writer
from torchtitan.checkpoint.manifest import MANIFEST, TRAIN_STATE, FileRecord, write_manifest
from torchtitan.config.training import Training
from torchtitan.data.datasets import vocabulary_of
from torchtitan.data.paths import open_path
from torchtitan.errors import CheckpointError, DataError, UserError
from torchtitan.files import sha256_of
from torchtitan.models import MODELS
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.qwen3 import Qwen3MoEArgs
from torchtitan.models.rope import Llama3Scaling
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.tools.generation.open import open_model
from torchtitan.tools.interchange.convert import find_model, import_weights, one_process, saved_model
from torchtitan.tools.interchange.export import export
from torchtitan.tools.interchange.model import PublishedModel
from torchtitan.tools.tokenize import read_own_metadata

LLAMA = LlamaArgs(32, 2, 4, 2, 48, 4096, rope_scaling=Llama3Scaling(factor=8.0, original=32))
SPARSE = Qwen3MoEArgs(32, 2, 4, 2, 48, 4096, head_dim=16, moe=MoEArgs(4, 2, 16))
FEW: list[Any] = [None, "big", [], -1, 0, 2.5, 10**9]
MANY = [*FEW, True, "", [1], {}, {"a": 1}, 1, 3, 2**63, 10**30, 1e308, float("nan"), float("inf"), "\x1b[31m"]
SWEEPS = pytest.mark.parametrize("values", [FEW, pytest.param(MANY, marks=pytest.mark.full)], ids=["few", "many"])
MISSING = object()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group(tokenizer_exported_once: None) -> Iterator[None]:
    with one_process():
        yield


def publish_model(folder: Path, args: Any) -> Path:
    family = "llama3" if isinstance(args, LlamaArgs) else "qwen3_moe"
    spec = MODELS.get(family)
    assert spec.naming is not None
    weights = dict(nontrivial(spec.build(args)).named_parameters())
    model = PublishedModel(spec.naming, args, spec.build, None, 64)
    export(folder, {name: weight.shape for name, weight in weights.items()}, weights.__getitem__, model, torch.float32)
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    return folder


def meta_folder(folder: Path) -> Path:
    folder.mkdir()
    torch.save(dict(nontrivial_llama(LlamaArgs(32, 2, 4, 2, 256, 4096)).state_dict()), folder / "consolidated.00.pth")
    params: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1}
    params |= {"multiple_of": 256, "use_scaled_rope": False}
    params |= {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0}
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def checkpoint(folder: Path) -> Path:
    """A weights-only checkpoint of this project."""
    args = LlamaArgs(32, 2, 4, 2, 48, 4096)
    state = {"weights_only": True, "identity": asdict(args), "step": 3}
    about = {
        "configuration": {"model": {"name": "llama3", "tokenizer_path": None}, "training": {"seq_len": 64}},
    }
    folder.mkdir()
    writer = step_writer(folder, 3, state, about)
    dcp.save(dict(nontrivial_llama(args).state_dict()), storage_writer=writer)
    return folder / "step-3"


def use(folder: Path) -> None:
    """What the commands do with a published folder."""
    open_model(folder, CPU, torch.float32, str(Path(__file__).parents[2] / "torchtitan/data/assets"))


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON object, also of objects and the first item of lists."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from leaves(value, (*path, key))
    elif isinstance(content, list) and content:
        yield (*path, 0)
        yield from leaves(content[0], (*path, 0))


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    content = json.loads(json.dumps(content))
    node = content
    for key in path[:-1]:
        node = node[key]
    if value is MISSING:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return content


def attempt(act: Callable[[], object], description: str) -> None:
    """Whatever happens, it is a success or one sentence."""
    try:
        act()
    except UserError as error:
        message = str(error)
        assert message and "\n" not in message and "\x1b" not in message and len(message) < 1500, description
    except BaseException as error:
        raise AssertionError(f"{description}: {type(error).__name__}: {error}") from error


@pytest.mark.full
@SWEEPS
@pytest.mark.parametrize("file_type", ["llama", "experts", "index", "params"])
def test_every_entry_with_every_wrong_value(
    file_type: str, values: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.tools.generation.open._tokenizer", lambda path, **_: FewIds())
    monkeypatch.setattr("torchtitan.tools.generation.open.check_published_tokenizer", lambda *_: None)
    folder = tmp_path / "model"
    if file_type == "params":
        meta_folder(folder)
    else:
        publish_model(folder, SPARSE if file_type == "experts" else LLAMA)
    file = folder / {"index": "model.safetensors.index.json", "params": "params.json"}.get(file_type, "config.json")
    if file_type == "index":
        names = load_file(folder / "model.safetensors").keys()
        file.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}))
    use(folder)
    good = json.loads(file.read_text())
    entries = list(leaves(good))[: 8 if file_type == "index" else None]
    for entry in entries:
        for value in [*values, MISSING]:
            file.write_text(json.dumps(with_value(good, entry, value)))
            attempt(lambda: use(folder), f"{'.'.join(map(str, entry))} = {value!r:.30}")


class FewIds:
    vocab_size = 10


@SWEEPS
@pytest.mark.parametrize("file", [MANIFEST, TRAIN_STATE])
def test_every_entry_of_a_checkpoint_with_every_wrong_value(file: str, values: list[Any], tmp_path: Path) -> None:
    """Under right hashes, as an attacker would write them."""
    folder = checkpoint(tmp_path / "run")
    path = folder / file
    manifest = json.loads((folder / MANIFEST).read_text())
    good = json.loads(path.read_text())
    for entry in leaves(good):
        for value in [*values, MISSING]:
            changed = with_value(good, entry, value)
            if file == TRAIN_STATE:
                path.write_text(json.dumps(changed))
                record = FileRecord(path.stat().st_size, sha256_of(path))
                changed = with_value(manifest, ("files", file), asdict(record))
            sign(folder, changed)
            attempt(lambda: saved_model(folder.parent), f"{'.'.join(map(str, entry))} = {value!r:.30}")


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    from torchtitan.checkpoint.manifest import _digest

    manifest.pop("sha256", None)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))


Harm = Callable[[Path], object]


def replaced(name: str, make: Callable[[Path], object]) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def to_pipe(name: str) -> Harm:
    return replaced(name, os.mkfifo)


def to_device(name: str) -> Harm:
    return replaced(name, lambda path: path.symlink_to("/dev/zero"))


def pth(change: Callable[[dict[Any, Any]], object]) -> Harm:
    def harm(folder: Path) -> None:
        weights = torch.load(folder / "consolidated.00.pth")
        torch.save(change(weights) or weights, folder / "consolidated.00.pth")

    return harm


def config(**values: Any) -> Harm:
    def harm(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **values}))

    return harm


def int32_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "model.norm.weight": torch.ones(32, dtype=torch.int32)}, folder / "model.safetensors")


def unknown_dtype(folder: Path) -> None:
    """One that safetensors has, but torch does not. All numbers before and after keep their places."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    weight = header["model.norm.weight"]
    start, end = weight["data_offsets"]
    header["rest"] = {"dtype": "U8", "shape": [104], "data_offsets": [start + 24, end]}
    weight.update(dtype="F6_E2M3", data_offsets=[start, start + 24])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room


def not_finite(value: float, *names: str) -> Harm:
    """The last number of these weights."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        for name in names:
            weights[name].view(-1)[-1] = value
        save_file(weights, folder / "model.safetensors")
        (folder / "SHA256SUMS").unlink(missing_ok=True)

    return harm


def infinite(weights: dict[Any, Any]) -> None:
    weights[EMBEDDING][-1, -1] = -math.inf


EMBEDDING = "tok_embeddings.weight"
HARMS: dict[str, tuple[str, Harm, str]] = {
    "a thousand million layers": ("hf", config(num_hidden_layers=10**9), "1,000,000,000 layers, but its files hold"),
    "a huge config.json": ("hf", replaced("config.json", large), "config.json cannot be read"),
    "int32": ("hf", int32_weight, r"norm.weight is torch.int32; only float32, bfloat16 and float16 can be loaded"),
    "a dtype that torch lacks": ("hf", unknown_dtype, "norm.weight cannot be read (Dtype not understood: F6_E2M3)"),
    **{f"{name} is a pipe": ("hf", to_pipe(name), "not a file") for name in
       ("config.json", "model.safetensors", "model.safetensors.index.json", "SHA256SUMS")},
    **{f"{name} is a device": ("hf", to_device(name), "not a file") for name in
       ("config.json", "model.safetensors", "model.safetensors.index.json", "SHA256SUMS")},
    "weights are a pipe": ("meta", to_pipe("consolidated.00.pth"), "not a file"),
    "weights are a device": ("meta", to_device("consolidated.00.pth"), "not a file"),
    "params.json is a pipe": ("meta", to_pipe("params.json"), "not a file"),
    "NaN": (
        "hf", not_finite(math.nan, "model.norm.weight", "model.embed_tokens.weight"),
        "(NaN or infinity), in tok_embeddings.weight, norm.weight. "),
    "infinity": ("hf", not_finite(math.inf, "model.norm.weight"), "(NaN or infinity), in norm.weight. "),
    "infinity in .pth": ("meta", pth(infinite), f"(NaN or infinity), in {EMBEDDING}. "),
    "one number of any size": (
        "meta", pth(lambda w: w.update({EMBEDDING: torch.ones(1).expand(10**9, 32)})), "not stored one after the"),
    "no tensor": ("meta", pth(lambda w: w.update({EMBEDDING: "words"})), f"{EMBEDDING} is 'words'"),
    "no weights": ("meta", pth(lambda w: [1, 2]), "should be a valid dictionary"),
    "numbers as names": ("meta", pth(lambda w: w.update({5: torch.ones(1)})), "should be a valid string"),
    "on no device": ("meta", pth(lambda w: w.update({EMBEDDING: torch.ones(4096, 32, device="meta")})), "stored"),
    "sparse": ("meta", pth(lambda w: w.update({EMBEDDING: torch.ones(4096, 32).to_sparse()})), ".pth"),
    "a vector for a matrix": ("meta", pth(lambda w: w.update({EMBEDDING: torch.ones(4096)})), f"no matrix {EMBEDDING}"),
    "a name that colors": ("meta", pth(lambda w: w.update({"\x1b[31mred": torch.ones(1)})), r"\x1b[31mred"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_a_folder_is_refused_in_a_sentence(harm: str, tmp_path: Path) -> None:
    model_format, act, words = HARMS[harm]
    folder = publish_model(tmp_path / "m", LLAMA) if model_format == "hf" else meta_folder(tmp_path / "m")
    act(folder)
    for command in (lambda: use(folder), lambda: import_weights(folder, tmp_path / "out", None, None)):
        with pytest.raises(CheckpointError) as caught:
            command()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def published_files(folder: Path) -> object:
    """What reads config.json, the index and the headers of safetensors, or params.json."""
    _, source = find_model(folder, "llama3")
    return source.args, source.shape("norm.weight"), source.dtype("norm.weight")


def shards(folder: Path) -> object:
    """What reads metadata.json beside tokens, in training and in `torchtitan.tools.tokenize`."""
    attempt(lambda: read_own_metadata(folder), "tokenize")
    return open_path(str(folder), "text", vocabulary=vocabulary_of(TOKENIZER, Training()))


def published_folder(folder: Path) -> Path:
    publish_model(folder, LLAMA)
    names = load_file(folder / "model.safetensors").keys()
    listed = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    return folder


def shards_folder(folder: Path) -> Path:
    """As `torchtitan.tools.tokenize` writes them."""
    folder.mkdir()
    write_megatron(folder / "a.bin", [[7, 8, 9], [10, 11]])
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in folder.iterdir()}
    about = {"documents": 2, "empty": 0, "text_bytes": 17, "tokens": 5, "sources": [], "files": files}
    noted = {"tokenizer_ids": TOKENIZER.ids_fingerprint, "bos_id": 1, "eos_id": 2, **about}
    (folder / "metadata.json").write_text(json.dumps(noted))
    return folder


READERS: dict[str, tuple[Callable[[Path], Path], str, Callable[[Path], object]]] = {
    "config.json": (published_folder, "config.json", published_files),
    "index": (published_folder, "model.safetensors.index.json", published_files),
    "safetensors": (published_folder, "model.safetensors", published_files),
    "params.json": (meta_folder, "params.json", published_files),
    "manifest": (checkpoint, MANIFEST, lambda folder: saved_model(folder.parent)),
    "train state": (checkpoint, TRAIN_STATE, lambda folder: saved_model(folder.parent)),
    "metadata.json": (shards_folder, "metadata.json", shards),
}
PIECES = [b"", b"Infinity", b"-Infinity", b"NaN", b"9" * 5000, b"[" * 200_000, b'{"a":' * 200_000, b"1e999", b"-1"]
PIECES += [b"null", b'"', b"{}", b"[]", b"\xff", b"\0", b"\xef\xbb\xbf", b"true", b'"\\ud800"', b"1.5", b","]
VALUE = re.compile(rb'(?<=: )("[^"]*"|[-\w.]+)')


def mutated(content: bytes, seed: int) -> bytes:
    """With a value in it, or any bytes, replaced; drawn from one number, since hypothesis takes longer than readers."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        values = [match.span() for match in VALUE.finditer(content)]
        start = draw.randrange(len(content) or 1)
        start, end = draw.choice(values) if values and draw.random() < 0.5 else (start, start + draw.randint(0, 12))
        content = content[:start] + draw.choice(PIECES) + content[end:]
    return content


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("reader", READERS)
def test_mutated_files_are_read_or_refused_in_a_sentence(reader: str, count: int, tmp_path: Path) -> None:
    make, name, read = READERS[reader]
    folder = make(tmp_path / "made")
    file = folder / name
    good, header = file.read_bytes(), 0
    read(folder)
    if reader == "safetensors":
        header = int.from_bytes(good[:8], "little")
    manifest = json.loads((folder / MANIFEST).read_text()) if reader == "train state" else {}

    for seed in range(count):
        if header:
            text = mutated(good[8 : 8 + header], seed)
            file.write_bytes(len(text).to_bytes(8, "little") + text + good[8 + header :])
        else:
            file.write_bytes(mutated(good, seed))
        if manifest:
            record = FileRecord(file.stat().st_size, sha256_of(file))
            sign(folder, with_value(manifest, ("files", name), asdict(record)))
        attempt(lambda: read(folder), f"mutated with {seed}")


@pytest.mark.parametrize(
    "value", ["Infinity", "9" * 5000, "[" * 200_000, "-1", "2.5", '"9"', "null"], ids=lambda v: v[:9]
)
def test_sizes_in_metadata_of_shards_are_numbers(value: str, tmp_path: Path) -> None:
    folder = shards_folder(tmp_path / "made")
    noted = json.loads((folder / "metadata.json").read_text())
    noted["files"]["a.bin"]["size"] = "SIZE"
    (folder / "metadata.json").write_text(json.dumps(noted).replace('"SIZE"', value))
    with pytest.raises(DataError, match=r"metadata\.json is damaged"):
        open_path(str(folder), "text", vocabulary=vocabulary_of(TOKENIZER, Training()))
    with pytest.raises(DataError, match=r"metadata\.json is damaged"):
        read_own_metadata(folder)


def test_lists_of_hashes_as_sha256sum_writes_them(tmp_path: Path) -> None:
    folder = publish_model(tmp_path / "m", LLAMA)
    digest = sha256_of(folder / "config.json")
    for line in (f"{digest}  config.json", f"{digest} *config.json", f"{digest.upper()}  ./config.json\r", "\n"):
        (folder / "SHA256SUMS").write_text(f"{line}\n")
        find_model(folder)
    for line, words in (
        (f"{'0' * 64} *config.json", "config.json has changed"),
        (f"{digest}  ../../etc/hostname", "no SHA-256 of a file in the folder"),
        (f"{digest}  /etc/hostname", "no SHA-256 of a file in the folder"),
        ("hello", "no SHA-256 of a file in the folder"),
        (f"{digest}  none.json", "none.json cannot be read"),
    ):
        (folder / "SHA256SUMS").write_text(f"{line}\n")
        with pytest.raises(CheckpointError, match=words):
            find_model(folder)


def test_a_checkpoint_that_is_pruned_while_it_is_read(tmp_path: Path) -> None:
    saved = saved_model(checkpoint(tmp_path / "run"))
    shutil.rmtree(saved.checkpoint)
    with pytest.raises(CheckpointError, match=r"norm.weight cannot be read .*removed this checkpoint in the meantime"):
        saved.weight("norm.weight")


def test_a_checkpoint_that_claims_more_than_it_has(tmp_path: Path) -> None:
    import pickle

    folder = checkpoint(tmp_path / "run")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata[EMBEDDING]
    tensor.size = tensor.chunks[0].sizes = torch.Size([2**40, 32])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((folder / MANIFEST).read_text())
    files = {name: FileRecord((folder / name).stat().st_size, sha256_of(folder / name)) for name in manifest["files"]}
    write_manifest(folder, {"step": 3, "configuration": manifest["configuration"]}, files)
    with pytest.raises(CheckpointError, match=r"its tensors have 140,\d+,\d+,\d+,\d+ bytes, but its files"):
        saved_model(folder)


def test_integers_are_no_weights_of_a_checkpoint_either(tmp_path: Path) -> None:
    args = LlamaArgs(32, 2, 4, 2, 48, 4096)
    state = {"weights_only": True, "identity": asdict(args), "step": 3}
    about = {"configuration": {"model": {"name": "llama3", "tokenizer_path": None}, "training": {"seq_len": 64}}}
    weights = dict(nontrivial_llama(args).state_dict()) | {"norm.weight": torch.ones(32, dtype=torch.int32)}
    writer = step_writer(tmp_path, 3, state, about)
    dcp.save(weights, storage_writer=writer)
    with pytest.raises(CheckpointError, match=r"norm\.weight is torch\.int32 in the checkpoint"):
        saved_model(tmp_path)
