"""Conflicts between keys: found before anything is built, all at once, each naming its key."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models.parallelize import parallelize
from torchtitan.optim.optimizer import OPTIMIZERS, OptimizerEntry
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
            ["--validation.dataset=c5"],  # even though validation is off
            r"validation\.dataset: unknown data set 'c5'.*; known: .*python_stdlib",
        ),
        (
            ["--training.dataset=c5", "--training.dataset_mixture=python_stdlib:1"],
            r"training\.dataset: unknown data set",
        ),
        (
            ["--parallelism.pipeline_parallel_schedule=1G1B"],
            r"unknown schedule '1G1B' \(did you mean 1F1B\?\); known: 1F1B",
        ),
        (
            ["--parallelism.pipeline_parallel_schedule=PipelineScheduleMulti"],
            r"unknown schedule 'PipelineScheduleMulti' without a pipeline_parallel_schedule_csv",
        ),
        (
            ["--model.parametrization=mup", "--model.mup_base_flavor=debug"],
            r"model\.mup_base_flavor: unknown flavor 'debug' \(did you mean debugmodel\?\); known: .*8B",
        ),
        (
            ["--model.parametrization=mup", "--optimizer.name=Adam"],
            r"model\.parametrization = mup has learning rates for AdamW, .*Muon8bit only; change .* = Adam",
        ),
        (
            ["--model.parametrization=mup", "--float8.weight_scale=bound"],
            r"float8\.weight_scale = bound assumes one learning rate .*, but model\.parametrization = mup has several",
        ),
        (["--model.converters=float9"], r"model\.converters: unknown converter 'float9'.*; known: .*float8"),
        (
            ["--metrics.trackers=wandb,trackoi"],
            r"metrics\.trackers: unknown tracker .*did you mean trackio\?\); known",
        ),
        (["--optimizer.name=SGDM"], r"optimizer\.name: unknown optimizer 'SGDM'.*; known: .*AdamW"),
        (
            ["--optimizer.no_weight_decay=norm"],
            r"no_weight_decay: unknown group 'norm' \(did you mean norms\?\); known: nor",
        ),
        (["--model.converters=float8,float8"], r"model\.converters: .*twice"),
        (["--training.global_batch_size=0"], r"training\.global_batch_size must be -1, an integer above 0, .*not '0'"),
        (
            ["--training.global_batch_size=-2"],
            r"training\.global_batch_size must be -1, an integer above 0, .*not '-2'",
        ),
        (["--training.global_batch_size=12"], r"global_batch_size = 12 is not a multiple of .* = 8 x 1 = 8"),
        (["--checkpoint.keep_latest_k=1"], r"checkpoint\.keep_latest_k = 1"),
        (["--checkpoint.load_step=5"], r"checkpoint\.load_step .*checkpoint\.enable_checkpoint"),
        (["--checkpoint.exclude_from_loading=optimiser"], r"exclude_from_loading: .*'optimiser' \(did you mean opt"),
        (["--checkpoint.async_mode=async_with_pinned_mem"], r"checkpoint\.async_mode = .* needs a GPU"),
        (
            ["--checkpoint.continue_from_path"],
            r"continue_from_path has no effect without checkpoint\.initial_load_path",
        ),
        (["--checkpoint.create_seed_checkpoint"], r"create_seed_checkpoint has no effect without checkpoint\.en"),
        (["--training.enable_cpu_offload"], r"training\.enable_cpu_offload needs a GPU"),
        (["--profiling.enable_memory_snapshot"], r"profiling\.enable_memory_snapshot needs a GPU"),
        (
            ["--activation_checkpoint.mode=full", "--activation_checkpoint.swiglu_dtype=int8"],
            r"swiglu_dtype = int8 is for layers that keep their activations, but mode = full recomputes .*mode = none",
        ),
        (["--validation.steps=0"], r"validation\.steps must be -1 or an integer above 0, not '0'\."),
        (["--activation_checkpoint.selective_ac_option=0"], r"selective_ac_option must be 'op' or a number"),
        (
            ["--checkpoint.folder=../../x"],
            r"checkpoint\.folder must be a path in job\.dump_folder, .* not '\.\./\.\./x'",
        ),
        (["--metrics.save_tb_folder=a/../../x"], r"metrics\.save_tb_folder must be .* in job\.dump_folder or absolute"),
        (["--parallelism.tensor_parallel_degree=2"], r"parallelism: .*tensor_parallel_degree|multiply to|divided"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_with_its_key(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*flags, folder=tmp_path)


TP, CP, PP = (f"--parallelism.{dimension}_parallel_degree" for dimension in ("tensor", "context", "pipeline"))
REPLICATES = "--parallelism.data_parallel_replicate_degree"
EARLY = ("--optimizer.early_step_in_backward",)  # gradients are then not clipped, and no step is skipped
BFLOAT16 = "--training.weight_dtype=bfloat16"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--optimizer.name=Adam", "--optimizer.state_dtype=bfloat16"],
            r"optimizer\.state_dtype has no effect without optimizer\.name = AdamW or Muon: ",
        ),
        (
            ["--optimizer.name=AdamW8bit", "--optimizer.state_dtype=bfloat16"],
            r"optimizer\.state_dtype has no effect without optimizer\.name = AdamW or Muon",
        ),
        (
            ["--optimizer.second_moment=v"],
            r"optimizer\.second_moment has no effect without optimizer\.name = AdamWFp8: ",
        ),
        (
            ["--optimizer.name=Adam", BFLOAT16],
            r"training\.weight_dtype = bfloat16 needs .* stochastic rounding.*, not Adam\.",
        ),
        ([BFLOAT16, "--training.global_batch_size=16"], r"training\.weight_dtype = .* 2 micro-batches .*_size = 8 \("),
        (["--optimizer.name=AdamWFp8", "--optimizer.implementation=foreach"], r"optimizer\.implementation = foreach"),
        (
            ["--optimizer.state_dtype=bfloat16", "--optimizer.implementation=for-loop"],
            r"optimizer\.implementation = for",
        ),
        ([BFLOAT16, "--optimizer.implementation=for-loop"], r"optimizer\.implementation = for"),
        ([*EARLY, "--training.skip_nonfinite"], r"early_step_in_backward .* set training\.skip_nonfinite = false"),
        (
            [*EARLY, "--training.skip_grad_norm_outliers=4"],
            r"early_step.* leave training\.skip_grad_norm_outliers unset",
        ),
        (
            [*EARLY, "--training.global_batch_size=24"],
            r"early_step_in_backward .* after each of 3 micro-batches: set .* 8 ",
        ),
        (
            ["--optimizer.muon_coefficients=nan,1,2"],
            r"optimizer\.muon_coefficients must be a list of 3 finite numbers, not \['nan', '1', '2'\]\.",
        ),
        ([*EARLY, "--optimizer.name=Muon"], r"early_step_in_backward .* Muon divides all matrices .*: unset it"),
        (["--optimizer.name=Muon8bit", "--optimizer.implementation=foreach"], r"implementation = foreach"),
        ([*EARLY, "--training.enable_cpu_offload"], r"early_step_in_backward .* unset training\.enable_cpu_offload"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_optimizers_that_cannot_be(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*flags, folder=tmp_path)


def test_groups_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text('[[optimizer.group]]\nlr = 1e-3\n[[optimizer.group]]\nparameters = ["w1"]\nalgorithm = "Muon"\n')
    with pytest.raises(ConfigError) as error:
        checked(f"--job.config_file={file}", "--float8.weight_scale=bound", folder=tmp_path)
    for message in (
        r"\[\[optimizer\.group\]\] 1 names no parameters",
        r"\[\[optimizer\.group\]\] 2: algorithm applies only to optimizer\.name = Muon; remove it, .* = AdamW\.",
        r"float8\.weight_scale = bound assumes one learning rate",
    ):
        assert any(re.search(message, problem) for problem in error.value.problems), message


def test_updates_in_the_backward_pass_of_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"early_step_in_backward .*unset it, or set parallelism\.pipeline_parallel_degree = 1"
    ):
        checked(*EARLY, f"{PP}=2", world_size=2, folder=tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([f"{PP}=2"], r"_reduce = bfloat16 would also sum .* pipeline .*: set it to float32, or .*pipeline_\S+ = 1\."),
        (
            [f"{REPLICATES}=2", "--training.global_batch_size=48"],
            r"_reduce = bfloat16 would also sum 3 micro-batches .* float32, or .*_size = 16 \(.*_degree = 1\.",
        ),
        (
            ["--training.mixed_precision_param=float32"],
            r"computed in bfloat16: set .*mixed_precision_param = bfloat16",
        ),
    ],
    ids=["pipeline", "replicas", "float32"],
)
def test_sums_in_bfloat16_that_would_lose_more(flags: list[str], message: str, tmp_path: Path) -> None:
    sums = "--training.mixed_precision_reduce=bfloat16"
    with pytest.raises(ConfigError, match=message):
        checked(*flags, sums, world_size=2, device_type="cuda", folder=tmp_path)
    checked(*flags, world_size=2, device_type="cuda", folder=tmp_path)
    checked(sums, "--training.global_batch_size=48", world_size=2, device_type="cuda", folder=tmp_path)


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_that_can_be_together(name: str, tmp_path: Path) -> None:
    checked(*EARLY, BFLOAT16, f"--optimizer.name={name}", folder=tmp_path)


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"training\.global_batch_size = 2 is smaller than the number of data-parallel ranks, 4"
    ):
        checked("--training.global_batch_size=2", "--training.local_batch_size=1", world_size=4, folder=tmp_path)


def test_a_global_batch_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    flags = ("--training.global_batch_size=6", "--training.local_batch_size=2")
    with pytest.raises(ConfigError, match=r"global_batch_size = 6 is not a multiple of .* = 2 x 2 = 4"):
        checked(*flags, world_size=2, folder=tmp_path)
    assert checked(*flags, world_size=3, folder=tmp_path).dp == 3


def test_degrees_that_do_not_make_the_world(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the degrees multiply to 4 .*, but there are 6 processes"):
        checked(
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=2",
            world_size=6,
            folder=tmp_path,
        )


SCHEDULE = "--parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("flags", "world_size", "messages"),
    [
        (
            [f"{TP}=3", "--training.seq_len=2047"],
            3,
            [
                r"tensor_parallel_degree = 3 does not divide the model's 16 heads; these degrees do: 1, 2, 4, 8, 16\.",
                r"16 key-value heads",
                r"4096 tokens in the vocabulary",
                r"training\.seq_len = 2047 .* 3 equal parts, as needed for tensor parallelism; set it to 2046 or 2049",
            ],
        ),
        (
            ["--model.flavor=8B", f"{TP}=16"],
            16,
            [r"tensor_parallel_degree = 16 .* 8 key-value heads; .*: 1, 2, 4, 8\."],
        ),
        (
            [f"{CP}=2", "--training.seq_len=2046"],
            2,
            [r"seq_len = 2046 .* 4 equal parts, as needed for context parallelism"],
        ),
        (
            ["--model.flavor=8B", f"{CP}=16", "--parallelism.context_parallel_rotate_method=alltoall"],
            16,
            [r"alltoall divides the 8 key-value heads over .* = 1 x 16, which do not divide .*; use allgather"],
        ),
        (
            ["--model.flavor=1B", f"{PP}=2"],
            2,
            [r"pipeline_parallel_degree = 2: .*output layer shares the embedding's weight"],
        ),
        (
            [f"{PP}=9", "--training.local_batch_size=9"],
            9,
            [r"makes 9 stages, but the model has only 6 layers, an embed"],
        ),
        (
            [f"{PP}=2", f"{SCHEDULE}=1F2B"],
            2,
            [r"pipeline_parallel_schedule: unknown schedule '1F2B' .*1F1B\?.*; known: 1F1B"],
        ),
        (
            [f"{PP}=2", f"{SCHEDULE}=ZBVZeroBubble", "--training.compile"],
            2,
            [r"ZBVZeroBubble .*unset training\.compile"],
        ),
        (
            [f"{PP}=4", "--training.local_batch_size=2"],
            4,
            [r"2 micro-batches .* 1F1B needs 4 or more, one for each stage"],
        ),
        ([f"{PP}=2", "--parallelism.pipeline_parallel_microbatch_size=3"], 2, [r"local_batch_size = 8 is not a mult"]),
        ([f"{PP}=2", f"{SCHEDULE}=Interleaved1F1B", "--training.local_batch_size=5"], 2, [r"divide into 2 rounds"]),
        (
            [f"{PP}=2", "--parallelism.pipeline_parallel_split_points=layers.2,layers.9"],
            2,
            [
                r"split_points must name layers from layers\.0 to layers\.5, or norm",
                r"one stage per rank, 2 in total, but there are 3",
            ],
        ),
        ([f"{PP}=2", "--parallelism.pipeline_parallel_layers_per_stage=1"], 2, [r"2 in total, but there are 6"]),
        ([f"{PP}=2", "--parallelism.pipeline_parallel_schedule_csv=none.csv"], 2, [r"there is no file none\.csv"]),
        ([f"{PP}=2", "--parallelism.pipeline_parallel_schedule_csv=/dev/zero"], 2, [r"there is no file /dev/zero"]),
        (
            ["--parallelism.enable_async_tensor_parallel", "--parallelism.tensor_parallel_degree=2"],
            2,
            [r"set training\.compile", r"this run is on cpu"],
        ),
    ],
    ids=lambda value: " ".join(flag.split(".")[-1] for flag in value) if isinstance(value, list) else "",
)
def test_degrees_that_do_not_fit_the_model(
    flags: list[str], world_size: int, messages: list[str], tmp_path: Path
) -> None:
    """All problems are reported at once, with valid alternatives."""
    with pytest.raises(ConfigError) as caught:
        checked(*flags, world_size=world_size, folder=tmp_path)
    problems = caught.value.problems
    assert len(problems) == len(messages), problems
    for message, problem in zip(messages, problems, strict=True):
        assert re.search(message, problem), problem


def test_tensor_parallel_ranks_on_several_machines_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    for here, warned in ((4, True), (8, False)):
        caplog.clear()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        checked(f"{TP}=8", world_size=16, folder=tmp_path)
        assert ("spans several machines" in caplog.text) == warned


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
    with pytest.raises(ConfigError, match=r"belongs to a run of llama3 8B, but this run is llama3 debugmodel"):
        checked(folder=tmp_path)
    checked("--model.flavor=8B", folder=tmp_path)


@pytest.mark.parametrize("damaged", ['[model]\nname = "lla', "model = 3", "[[model]]"], ids=["cut", "number", "list"])
def test_the_dump_folder_of_a_run_with_a_damaged_configuration(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(damaged)
    checked(folder=tmp_path)


def test_the_global_batch_follows_from_the_ranks_unless_given(tmp_path: Path) -> None:
    config = ConfigManager().parse_args(["--training.local_batch_size=3", f"--job.dump_folder={tmp_path}"])
    assert config.training.sequences_per_step(check(config, 4, "cpu").dp) == 12
    config = ConfigManager().parse_args(["--training.global_batch_size=32", f"--job.dump_folder={tmp_path}"])
    assert config.training.sequences_per_step(check(config, 4, "cpu").dp) == 32


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        (
            ["--float8.filter_fqns=typo", "--float8.enable_fsdp_float8_all_gather"],
            "float8.enable_fsdp_float8_all_gather, float8.filter_fqns: no effect in this run without float8 in "
            "model.converters",
        ),
        (["--validation.freq=7"], "validation.freq: no effect in this run without validation.enabled"),
        (["--parallelism.enable_async_tensor_parallel"], "parallelism.enable_async_tensor_parallel: no effect in this"),
        (["--checkpoint.interval=7"], "checkpoint.interval: no effect in this run without checkpoint.enable_checkp"),
        (["--parallelism.pipeline_parallel_microbatch_size=4"], "parallelism.pipeline_parallel_microbatch_size: no"),
        (["--lr_scheduler.decay_ratio=0", "--lr_scheduler.lr_min=0.1"], "lr_scheduler.lr_min: no effect in this run"),
        (["--training.dataset=c4", "--training.dataset_mixture=python_stdlib:1"], "training.dataset: no effect"),
        (
            ["--validation.enabled", "--validation.text_column=x"],
            "validation.text_column: no effect in this run without",
        ),
        (["--training.no_skip_nonfinite", "--training.max_skips_in_a_row=3"], "training.max_skips_in_a_row: no effect"),
        (
            ["--optimizer.name=Muon", "--optimizer.muon_polar_express", "--optimizer.muon_coefficients=1,2,3"],
            "optimizer.muon_coefficients: no effect in this run without optimizer.muon_polar_express = false",
        ),
        (
            ["--profiling.enable_profiling", "--profiling.save_memory_snapshot_folder=x"],
            "profiling.save_memory_snapshot_folder: no effect",
        ),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_a_key_of_what_is_off_is_told(flags: list[str], notice: str, log: list[str], tmp_path: Path) -> None:
    checked(*flags, folder=tmp_path)
    assert any(line.startswith(f"INFO {notice}") for line in log), log


def test_nothing_is_told_of_keys_that_are_used_or_at_their_defaults(log: list[str], tmp_path: Path) -> None:
    flags = ["--model.converters=float8", "--float8.filter_fqns=output", "--mx.filter_fqns=output"]
    checked(*flags, "--validation.enabled", "--validation.freq=7", "--activation_checkpoint.mode=none", folder=tmp_path)
    assert not any("no effect" in line for line in log)


def test_a_model_without_blocks_is_one_sentence() -> None:
    unused: Any = None  # the other arguments are never used
    with pytest.raises(ConfigError, match=r"model\.name: Linear cannot be sharded .* an nn\.ModuleDict named layers"):
        parallelize(cast(Any, torch.nn.Linear(2, 2)), {}, *[unused] * 6)


def test_a_users_optimizer_declares_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = OptimizerEntry(lambda parameters, section: torch.optim.SGD([]), state_dtypes=("float32", "bfloat16"))
    monkeypatch.setitem(OPTIMIZERS._entries, "own with small states", entry)
    checked("--optimizer.name=own with small states", "--optimizer.state_dtype=bfloat16", folder=tmp_path)
