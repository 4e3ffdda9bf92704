"""Checkpoints of other programs: runs of torchtitan go on here; the others are named, with the way to convert them."""

import base64
import json
import os
import pickle
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import SMALL, into, losses, tensors_of, train, train_here
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan.checkpoint.choose import find_checkpoint
from torchtitan.checkpoint.files import CheckpointReader, TensorsOnlyPlanner
from torchtitan.checkpoint.others import PROGRAMS, read_torchtitan
from torchtitan.config import ConfigManager
from torchtitan.data.byte_level import LLAMA3_SPLIT, llama3_special_tokens
from torchtitan.data.loader import Batch, Loader
from torchtitan.errors import CheckpointError
from torchtitan.run.machines import _keys
from torchtitan.tools.interchange.convert import find_model

ARCHIVE = Path(__file__).parents[1] / "helpers" / "checkpoint_of_torchtitan.tar.xz"  # made by the script of this name
WEIGHT = "layers.1.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtitan")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    pieces = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tokenizer.model").write_text("".join(pieces))
    special = {id: {"content": name} for name, id in llama3_special_tokens(256).items()}
    beside = {"pat_str": LLAMA3_SPLIT, "added_tokens_decoder": special}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder


@pytest.fixture
def checkpoint(unpacked: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unpacked, tmp_path / "theirs") / "checkpoint" / "step-3"


@pytest.fixture
def same_batches(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs read the batches of torchtitan's run, from its step 4 on. Returns all its steps."""
    steps: list[dict[str, Any]] = json.loads((unpacked / "steps.json").read_text())
    given, read = iter(steps[3:]), Loader.next

    def next_batches(loader: Loader) -> list[Batch]:
        (batch,), step = read(loader), next(given)
        return [replace(batch, tokens=torch.tensor(step["tokens"]), labels=torch.tensor(step["labels"]))]

    monkeypatch.setattr(Loader, "next", next_batches)
    return steps


def flags(checkpoint: Path) -> list[str]:
    common = "--training.seq_len=16 --training.local_batch_size=2 --training.global_batch_size=2 --training.steps=6 "
    common += "--lr_scheduler.warmup_steps=2 --optimizer.lr=0.01 --training.mixed_precision_param=bfloat16"
    own = "--experimental.custom_import=tiny --model.name=tiny --model.flavor=eight --metrics.log_freq=1"
    path = f"--checkpoint.initial_load_path={checkpoint}"
    return [*SMALL, *common.split(), *own.split(), "--lr_scheduler.decay_ratio=none", path, tokenizer(checkpoint)]


def tokenizer(checkpoint: Path) -> str:
    return f"--model.tokenizer_path={checkpoint.parents[1] / 'tokenizer.model'}"


GOES_ON = "--checkpoint.continue_from_path"


def test_a_run_of_torchtitan_goes_on(
    checkpoint: Path, same_batches: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(*flags(checkpoint), GOES_ON, "--checkpoint.enable_checkpoint", into(tmp_path))
    expected = {number: step["loss"] for number, step in enumerate(same_batches, 1) if number > 3}
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-3)
    output = "".join(capfd.readouterr())
    assert output.count("the data begin from the start") == 1 and 'training.skip_steps = ["1-3"]' in output
    assert "learning rate" not in output and "when the checkpoint was saved" not in output
    assert tensors_of(tmp_path, 6)[f"optimizer.state.{WEIGHT}.step"] == 6


def test_weights_alone_start_a_new_run(checkpoint: Path, same_batches: list[dict[str, Any]], tmp_path: Path) -> None:
    train_here(*flags(checkpoint), "--training.steps=1", into(tmp_path))
    assert losses(tmp_path) == {1: pytest.approx(same_batches[3]["loss"], abs=1e-3)}


@pytest.mark.parametrize(
    "layout",
    [
        "--training.local_batch_size=1",  # FSDP
        pytest.param("--parallelism.tensor_parallel_degree=2", marks=pytest.mark.full),
        pytest.param("--parallelism.pipeline_parallel_degree=2", marks=pytest.mark.full),
    ],
)
def test_it_goes_on_under_other_layouts(layout: str, checkpoint: Path, tmp_path: Path) -> None:
    exact = (*flags(checkpoint), GOES_ON, "--training.mixed_precision_param=float32")
    train_here(*exact, into(tmp_path / "one"))
    train(*exact, layout, into(tmp_path / "two"), processes=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_all_machines_must_go_on_alike() -> None:
    keys = _keys(ConfigManager().parse_args(["--checkpoint.initial_load_path=here", GOES_ON]))
    assert [key for key in keys if key.endswith("path")] == ["checkpoint.continue_from_path"]


def entries_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the run of torchtitan, read by torch."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes()).state_dict_metadata
    sizes = {name: entry for name, entry in metadata.items() if hasattr(entry, "size")}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in sizes.items()}
    dcp.load(tensors, checkpoint_id=checkpoint)
    return tensors


def test_weights_without_a_prefix_as_later_versions_and_last_checkpoints_have_them(
    checkpoint: Path, same_batches: list[dict[str, Any]], tmp_path: Path
) -> None:
    weights = {name[6:]: tensor for name, tensor in entries_of(checkpoint).items() if name.startswith("model.")}
    shutil.rmtree(checkpoint)
    dcp.save({**weights, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=checkpoint)
    train_here(*flags(checkpoint), "--training.steps=1", into(tmp_path / "run"))
    assert losses(tmp_path / "run") == {1: pytest.approx(same_batches[3]["loss"], abs=1e-3)}
    with pytest.raises(CheckpointError, match=r"step-3 holds only the weights.*continue_from_path off"):
        train_here(*flags(checkpoint), GOES_ON, into(tmp_path / "other"))


def test_experts_tied_and_float8_weights_are_read(tmp_path: Path) -> None:
    from torchtitan.compat.torchao import LinearMMConfig, WeightWithDynamicFloat8CastTensor, allow_float8_weights

    experts = {f"layers.0.moe.experts.w{number}": torch.ones(2, 3, 4) for number in (1, 2, 3)}
    gathered = WeightWithDynamicFloat8CastTensor(torch.ones(4, 4), LinearMMConfig(), torch.float8_e4m3fn)
    moments = {"state.layers.0.moe.experts.w1.exp_avg_sq": torch.ones(2, 3, 4)}
    moments["state.tok_embeddings.weight.exp_avg"] = torch.ones(4, 4)  # tied: the only moments of the two
    tied = {"tok_embeddings.weight": gathered, "output.weight": torch.ones(4, 4)}
    state = {"model": {**experts, **tied}, "optimizer": moments, "train_state": {"step": 5}}
    dcp.save(state, checkpoint_id=tmp_path / "step-5")
    train_state, metadata, _ = read_torchtitan(tmp_path / "step-5")
    assert (train_state.step, train_state.weights_only) == (5, False)
    assert {*metadata.state_dict_metadata} == {
        *(f"layers.0.moe.experts.w{number}.weight" for number in (1, 2, 3)),
        "optimizer.state.layers.0.moe.experts.w1.weight.exp_avg_sq",
        "optimizer.state.tok_embeddings.weight.exp_avg",
        "tok_embeddings.weight",
    }
    allow_float8_weights()
    loaded = {"tok_embeddings.weight": torch.zeros(4, 4)}
    dcp.load(loaded, storage_reader=CheckpointReader(tmp_path / "step-5", metadata), planner=TensorsOnlyPlanner())
    assert loaded["tok_embeddings.weight"].equal(torch.ones(4, 4))


def test_a_file_of_torchtitan_that_differs_is_reported(
    checkpoint: Path, same_batches: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(*flags(checkpoint), GOES_ON, into(tmp_path), "--optimizer.beta2=0.9", "--lr_scheduler.warmup_steps=5")
    output = "".join(capfd.readouterr())
    assert "optimizer.beta2 = 0.9; it was 0.95 when the checkpoint was saved" in output
    assert re.search(r"the learning rate of step 4 is 0\.008; it would have been 0\.0075", output), output


def change(checkpoint: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    edit(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"mkdir {self.mark}",)


def in_place_of(name: str, value: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    """An entry that torch.save writes: a pickle."""

    def attack(checkpoint: Path, mark: Path) -> None:
        torch.save(value(mark), checkpoint / "__0_1.distcp")

        def lead_there(metadata: Metadata) -> None:
            place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
            place.relative_path, place.offset = "__0_1.distcp", 0
            place.length = (checkpoint / "__0_1.distcp").stat().st_size

        change(checkpoint, lead_there)

    return attack


def metadata_of(edit: Callable[[Metadata, Path], object]) -> Callable[[Path, Path], None]:
    return lambda checkpoint, mark: change(checkpoint, lambda metadata: edit(metadata, mark))


def every_place(**values: Any) -> Callable[[Metadata, Path], None]:
    def edit(metadata: Metadata, mark: Path) -> None:
        for place in metadata.storage_data.values():
            vars(place).update(values)

    return edit


def without_places(metadata: Metadata, mark: Path) -> None:
    metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if not i.fqn.endswith(f"model.{WEIGHT}")}


ATTACKS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "code in the step": (in_place_of("train_state.step", Evil), "train_state.step cannot be read"),
    "code in a setting": (
        in_place_of("optimizer.param_groups.tok_embeddings.weight.lr", Evil),
        "param_groups.tok_embeddings.weight.lr cannot be read",
    ),
    "code in a tensor": (in_place_of(f"model.{WEIGHT}", Evil), "could not be loaded"),
    "code as metadata": (
        lambda checkpoint, mark: (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(mark))),
        "refers to posix.system",
    ),
    "code in metadata": (metadata_of(lambda m, mark: setattr(m, "planner_data", Evil(mark))), "refers to posix.system"),
    "text for a step": (in_place_of("train_state.step", lambda _: "3"), "train_state.step is '3'"),
    "step below 0": (in_place_of("train_state.step", lambda _: -3), "train_state.step is -3"),
    "another step": (in_place_of("train_state.step", lambda _: 4), "train_state.step is 4: the folder is a renamed"),
    "long step": (in_place_of("train_state.step", lambda _: "3" * 10**6), "train_state.step cannot be read (it has 1"),
    "text for a rate": (
        in_place_of("optimizer.param_groups.tok_embeddings.weight.lr", lambda _: "fast"),
        "tok_embeddings.weight.lr is 'fast'",
    ),
    "cut metadata": (lambda checkpoint, mark: os.truncate(checkpoint / ".metadata", 5000), ".metadata is refused"),
    "cut tensors": (
        lambda checkpoint, mark: os.truncate(checkpoint / "__0_0.distcp", 99_000),
        "__0_0.distcp is shorter",
    ),
    "no tensors": (lambda checkpoint, mark: (checkpoint / "__0_0.distcp").unlink(), "points to '__0_0.distcp'"),
    "elsewhere": (metadata_of(every_place(relative_path="../../steps.json")), "points to '../../steps.json'"),
    "before the file": (metadata_of(every_place(offset=-1)), "__0_0.distcp is shorter"),
    "text for a place": (metadata_of(every_place(offset="0")), ".metadata is refused"),
    "no place": (metadata_of(without_places), f"model.{WEIGHT} is incomplete"),
    "no parts": (
        metadata_of(lambda m, _: m.state_dict_metadata[f"model.{WEIGHT}"].chunks.clear()),
        f"model.{WEIGHT} is incomplete",
    ),
    "wrong shape": (in_place_of(f"model.{WEIGHT}", lambda _: torch.ones(1)), "could not be loaded"),
    "keys of no tensors": (metadata_of(lambda m, _: m.storage_data.update({1: 2})), ".metadata is refused"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_it_is_executed(attack: str, checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    harm, message = ATTACKS[attack]
    harm(checkpoint, mark)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        train_here(*flags(checkpoint), GOES_ON, into(tmp_path / "run"))
    assert "step-3" in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()


def test_the_data_position_is_never_read(checkpoint: Path, same_batches: list[dict[str, Any]], tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    in_place_of("dataloader.dp_rank_0", Evil)(checkpoint, mark)
    train_here(*flags(checkpoint), GOES_ON, into(tmp_path / "run"))
    assert [*losses(tmp_path / "run")] == [4, 5, 6] and not mark.exists()


REFUSED = {  # flags after the test's own: what the sentence says
    "--model.flavor=narrow": "does not match the model of this run: tok_embeddings.weight has shape (512, 8) in the",
    "--optimizer.name=Muon": "does not match the optimizer.*momentum.*exclude_from_loading=optimizer",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_another_model_or_optimizer_is_refused(flag: str, checkpoint: Path, tmp_path: Path) -> None:
    message = REFUSED[flag] if ".*" in REFUSED[flag] else re.escape(REFUSED[flag])
    with pytest.raises(CheckpointError, match=message):
        train_here(*flags(checkpoint), GOES_ON, flag, into(tmp_path))


def test_the_folders_around_it_are_understood(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("step-2"))
    for folder in (checkpoint.parent, checkpoint.parents[1]):  # of checkpoints, and the dump folder
        with pytest.raises(CheckpointError, match=rf"It contains checkpoints: use {checkpoint}\."):
            train_here(*flags(folder), tokenizer(checkpoint), GOES_ON, into(tmp_path / "run"))
        with pytest.raises(
            CheckpointError, match=r"step-3 is a checkpoint of torchtitan: it does not record its model"
        ):
            find_checkpoint(folder)
    own = (into(checkpoint.parents[1]), "--checkpoint.enable_checkpoint")
    with pytest.raises(CheckpointError, match=rf"initial_load_path={checkpoint} --checkpoint\.continue_from_path and"):
        train_here(*flags(checkpoint), *own)
    with pytest.raises(CheckpointError, match=r"step-3 is a checkpoint of torchtitan.*model\.flavor"):
        train_here(*flags(checkpoint), "--model.flavor=auto", into(tmp_path / "run"))
    (checkpoint / "train_state.json").touch()  # one of this program that has lost its manifest
    with pytest.raises(CheckpointError, match=r"is damaged.*manifest.json is missing"):
        train_here(*flags(checkpoint), into(tmp_path / "run"))


FILES = {program.name: program.files for program in PROGRAMS if program.name != "torchtitan"}


@pytest.mark.parametrize("name, file", [(name, file) for name, files in FILES.items() for file in files])
def test_others_are_named_with_the_way_to_convert_them(name: str, file: str, tmp_path: Path) -> None:
    place = tmp_path / "theirs" / file.replace("*", "00")
    place.parent.mkdir(parents=True)
    place.touch()
    for other in ("config.json", ".metadata", "metadata.json"):  # which some of them have, too
        (tmp_path / "theirs" / other).write_text('{"sharded_backend": "torch_dist"}')
    sentence = rf"theirs is a checkpoint of {name}: .*(Hugging Face|convert).*(give|folder)"
    with pytest.raises(CheckpointError, match=sentence):
        find_model(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=sentence):
        find_checkpoint(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=sentence):
        train_here(*SMALL, "--training.steps=1", into(tmp_path), f"--checkpoint.initial_load_path={tmp_path}/theirs")


def test_megatron_core_itself_writes_such_a_folder(tmp_path: Path) -> None:
    """The signature comes from its package, not from memory."""
    core = pytest.importorskip("megatron.core.dist_checkpointing.strategies.common")
    assert core.COMMON_STATE_FNAME in FILES["Megatron-LM"]
