"""Mistakes between keys: found before anything is built, all at once, each naming its key."""

from pathlib import Path

import pytest

from torchtitan.checks import check, global_batch_size
from torchtitan.config import ConfigManager
from torchtitan.errors import ConfigError
from torchtitan.parallel.dims import ParallelDims


def checked(*flags: str, world_size: int = 1, device_type: str = "cpu", folder: Path) -> ParallelDims:
    config = ConfigManager().parse_args([f"--job.dump_folder={folder}", *flags])
    return check(config, world_size, device_type)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.name=lama3"], r"model\.name: unknown model 'lama3' \(did you mean llama3\?\); known: .*llama2"),
        (["--model.flavor=9B"], r"model\.flavor: unknown flavor '9B'.*; known: .*debugmodel.*8B"),
        (["--training.dataset=c5"], r"training\.dataset: unknown data set 'c5'.*; known: .*python_stdlib"),
        (
            ["--validation.enabled", "--validation.dataset=c5"],
            r"validation\.dataset: unknown data set 'c5'.*; known: .*python_stdlib",
        ),
        (["--model.converters=float9"], r"model\.converters: unknown converter 'float9'.*; known: .*float8"),
        (["--optimizer.name=SGD"], r"optimizer\.name: unknown optimizer 'SGD'.*; known: .*AdamW"),
        (["--model.converters=float8,float8"], r"model\.converters: .*twice"),
        (["--training.global_batch_size=0"], r"training\.global_batch_size .*above 0, not 0"),
        (["--training.global_batch_size=-2"], r"training\.global_batch_size .*above 0, not -2"),
        (["--training.global_batch_size=12"], r"global_batch_size = 12 is not a multiple of .* = 8 x 1 = 8"),
        (["--checkpoint.keep_latest_k=1"], r"checkpoint\.keep_latest_k = 1"),
        (["--checkpoint.load_step=5"], r"checkpoint\.load_step .*checkpoint\.enable_checkpoint"),
        (["--checkpoint.exclude_from_loading=optimiser"], r"exclude_from_loading: .*'optimiser' \(did you mean opt"),
        (["--checkpoint.exclude_from_loading=lr_scheduler"], r"exclude_from_loading: .*train_state"),
        (["--checkpoint.async_mode=async_with_pinned_mem"], r"checkpoint\.async_mode = .* needs a GPU"),
        (["--checkpoint.create_seed_checkpoint"], r"create_seed_checkpoint needs checkpoint\.enable_checkpoint"),
        (["--training.enable_cpu_offload"], r"training\.enable_cpu_offload needs a GPU"),
        (["--profiling.enable_memory_snapshot"], r"profiling\.enable_memory_snapshot needs a GPU"),
        (["--activation_checkpoint.selective_ac_option=0"], r"selective_ac_option must be 'op' or a number"),
        (["--parallelism.tensor_parallel_degree=2"], r"parallelism: .*tensor_parallel_degree|multiply to|divided"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_with_its_key(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*flags, folder=tmp_path)


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.global_batch_size = 2 is smaller than the 4 data-parallel ranks"):
        checked("--training.global_batch_size=2", "--training.local_batch_size=1", world_size=4, folder=tmp_path)


def test_a_global_batch_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    flags = ("--training.global_batch_size=6", "--training.local_batch_size=2")
    with pytest.raises(ConfigError, match=r"global_batch_size = 6 is not a multiple of .* = 2 x 2 = 4"):
        checked(*flags, world_size=2, folder=tmp_path)
    assert checked(*flags, world_size=3, folder=tmp_path).dp == 3


def test_degrees_that_do_not_make_the_world(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the degrees multiply to 4, but there are 6 processes"):
        checked(
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=2",
            world_size=6,
            folder=tmp_path,
        )


def test_a_seed_checkpoint_needs_one_process(tmp_path: Path) -> None:
    flags = ("--checkpoint.enable_checkpoint", "--checkpoint.create_seed_checkpoint")
    with pytest.raises(ConfigError, match=r"create_seed_checkpoint needs one process"):
        checked(*flags, world_size=2, folder=tmp_path)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    flags = ["--model.name=none_such", "--training.global_batch_size=12", "--checkpoint.keep_latest_k=1"]
    with pytest.raises(ConfigError) as caught:
        checked(*flags, folder=file)
    first_words = [problem.split()[0].rstrip(":") for problem in caught.value.problems]
    assert sorted(first_words) == [
        "checkpoint.keep_latest_k",
        "job.dump_folder",
        "model.name",
        "training.global_batch_size",
    ]


def test_a_dump_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(ConfigError, match=rf"job\.dump_folder: {folder} cannot be written"):
            checked(folder=folder)


def test_the_dump_folder_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    with pytest.raises(ConfigError, match=r"belongs to a run of llama3 8B, and this is llama3 debugmodel"):
        checked(folder=tmp_path)
    checked("--model.flavor=8B", folder=tmp_path)


def test_the_dump_folder_of_a_run_that_a_crash_cut_short(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\nname = "lla')
    checked(folder=tmp_path)


def test_the_global_batch_follows_from_the_ranks_unless_given(tmp_path: Path) -> None:
    config = ConfigManager().parse_args(["--training.local_batch_size=3", f"--job.dump_folder={tmp_path}"])
    assert global_batch_size(config, check(config, 4, "cpu")) == 12
    config = ConfigManager().parse_args(["--training.global_batch_size=32", f"--job.dump_folder={tmp_path}"])
    assert global_batch_size(config, check(config, 4, "cpu")) == 32
