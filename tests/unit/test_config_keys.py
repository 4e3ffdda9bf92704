"""Every key that users already have in their files loads from TOML and from a flag, with its type and default."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.fields import fields_by_key
from torchtitan.errors import ConfigError

# key: (default, other valid values)
KEYS: dict[str, tuple[Any, ...]] = {
    "job.dump_folder": ("./outputs", "runs/a b"),
    "job.description": ("default job", "Llama, again = 100%"),
    "job.print_args": (False, True),
    "profiling.enable_profiling": (False, True),
    "profiling.save_traces_folder": ("profile_traces", "t"),
    "profiling.profile_freq": (10, 1),
    "profiling.enable_memory_snapshot": (False, True),
    "profiling.save_memory_snapshot_folder": ("memory_snapshot", "m"),
    "metrics.log_freq": (10, 1),
    "metrics.enable_tensorboard": (False, True),
    "metrics.disable_color_printing": (False, True),
    "metrics.save_tb_folder": ("tb", "board"),
    "metrics.save_for_all_ranks": (False, True),
    "model.name": ("llama3", "llama2"),
    "model.flavor": ("debugmodel", "8B"),
    "model.tokenizer_path": (None, "assets/tokenizer.model"),
    "model.converters": ([], ["float8"], ["float8", "mx"]),
    "model.print_after_conversion": (False, True),
    "optimizer.name": ("AdamW", "Adam", "AdamW8bit"),
    "optimizer.lr": (8e-4, 3e-5, 1.0),
    "optimizer.beta1": (0.9, 0.5),
    "optimizer.beta2": (0.95, 0.999),
    "optimizer.eps": (1e-8, 1e-15),
    "optimizer.weight_decay": (0.1, 0.0),
    "optimizer.no_weight_decay": (["norms"], [], ["norms", "embeddings"]),
    "optimizer.implementation": ("fused", "for-loop", "foreach"),
    "optimizer.state_dtype": ("float32", "bfloat16"),
    "optimizer.second_moment": ("sqrt_v", "v", "v_e5m2"),
    "optimizer.early_step_in_backward": (False, True),
    "lr_scheduler.warmup_steps": (200, 0),
    "lr_scheduler.decay_ratio": (None, 0.1, 1.0),
    "lr_scheduler.decay_type": ("linear", "sqrt", "cosine", "power"),
    "lr_scheduler.lr_min": (0.0, 0.1),
    "training.dataset": ("python_stdlib", "c4"),
    "training.dataset_path": (None, "data/text.jsonl"),
    "training.local_batch_size": (8, 1),
    "training.global_batch_size": (-1, 64),
    "training.seq_len": (2048, 8192),
    "training.max_norm": (1.0, 0.5, float("inf")),
    "training.steps": (10000, 1),
    "training.weight_dtype": ("float32", "bfloat16"),
    "training.enable_cpu_offload": (False, True),
    "training.mixed_precision_param": ("auto", "bfloat16", "float32"),
    "training.mixed_precision_reduce": ("float32", "bfloat16"),
    "training.compile": (False, True),
    "training.gc_freq": (50, 1),
    "training.gc_debug": (False, True),
    "training.seed": (0, 42),
    "training.deterministic": (False, True),
    "evaluation.at_start": (False, True),
    "parallelism.data_parallel_replicate_degree": (1, 2),
    "parallelism.data_parallel_shard_degree": (-1, 4),
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.tensor_parallel_degree": (1, 2),
    "parallelism.disable_loss_parallel": (False, True),
    "parallelism.enable_async_tensor_parallel": (False, True),
    "parallelism.pipeline_parallel_degree": (1, 2),
    "parallelism.pipeline_parallel_split_points": ([], ["layers.2", "layers.4"]),
    "parallelism.pipeline_parallel_layers_per_stage": (None, 2),
    "parallelism.pipeline_parallel_schedule": ("1F1B", "Interleaved1F1B"),
    "parallelism.pipeline_parallel_schedule_csv": ("", None, "schedule.csv"),
    "parallelism.pipeline_parallel_microbatch_size": (1, 2),
    "parallelism.context_parallel_degree": (1, 2),
    "parallelism.context_parallel_rotate_method": ("allgather", "alltoall"),
    "checkpoint.enable_checkpoint": (False, True),
    "checkpoint.folder": ("checkpoint", "saved"),
    "checkpoint.initial_load_path": (None, "other/checkpoint/step-10"),
    "checkpoint.initial_load_model_weights_only": (True, False),
    "checkpoint.continue_from_path": (False, True),
    "checkpoint.interval": (500, 1),
    "checkpoint.last_save_model_weights_only": (False, True),
    "checkpoint.export_dtype": ("float32", "float16", "bfloat16"),
    "checkpoint.create_seed_checkpoint": (False, True),
    "checkpoint.async_mode": ("disabled", "async", "async_with_pinned_mem"),
    "checkpoint.keep_latest_k": (10, 0),
    "checkpoint.keep_every": (None, 1000, "2.5B"),
    "checkpoint.load_step": (-1, 20),
    "checkpoint.exclude_from_loading": ([], ["optimizer", "dataloader"]),
    "checkpoint.enable_first_step_checkpoint": (False, True),
    "activation_checkpoint.mode": ("selective", "full", "none"),
    "activation_checkpoint.selective_ac_option": ("2", "op"),
    "activation_checkpoint.swiglu_dtype": (None, "int8", "float8"),
    "float8.recipe_name": (None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed"),
    "float8.cast_input": (None, "dynamic", "delayed"),
    "float8.cast_weight": (None, "dynamic", "delayed"),
    "float8.cast_grad_output": (None, "dynamic", "delayed"),
    "float8.delayed_history_len": (16, 1),
    "float8.delayed_amax": ("max", "most_recent"),
    "float8.delayed_margin": (0, 2),
    "float8.delayed_format": ("hybrid", "e4m3"),
    "float8.weight_scale": ("measured", "bound"),
    "float8.weight_scale_freq": (16, 1),
    "float8.enable_fsdp_float8_all_gather": (False, True),
    "float8.precompute_float8_dynamic_scale_for_fsdp": (False, True),
    "float8.filter_fqns": (["output"], ["attention.wk", "output", "auto_filter_small_kn"]),
    "float8.emulate": (False, True),
    "mx.recipe_name": ("mxfp8", "mxint8", "nvfp4"),
    "mx.filter_fqns": (["output"], ["output", "wk"], []),
    "comm.init_timeout_seconds": (300, 10),
    "comm.train_timeout_seconds": (100, 10),
    "comm.save_timeout_seconds": (1800, 10),
    "comm.trace_buf_size": (20000, 0),
    "experimental.custom_import": ("", "my_package.models"),
}


def get(config: JobConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def toml_file(folder: Path, values: dict[str, Any]) -> str:
    tables: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        tables.setdefault(section, {})[name] = value
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(tables))
    return f"--job.config_file={path}"


def flag_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def same(actual: Any, expected: Any) -> bool:
    return actual == expected and type(actual) is type(expected)


def test_defaults() -> None:
    config = ConfigManager().parse_args([])
    assert {key: get(config, key) for key in KEYS} == {key: values[0] for key, values in KEYS.items()}
    assert all(same(get(config, key), values[0]) for key, values in KEYS.items())
    assert config.job.config_file is None and config.experimental.custom_args_module == ""


@pytest.mark.parametrize("key", KEYS)
def test_key_loads_from_toml_and_from_flags(key: str, tmp_path: Path) -> None:
    for value in KEYS[key]:
        from_flag = ConfigManager().parse_args([f"--{key}={flag_text(value)}"])
        assert same(get(from_flag, key), value)
        assert ConfigManager().parse_args([f"--{key}", flag_text(value)]) == from_flag
        if value is not None:
            from_file = ConfigManager().parse_args([toml_file(tmp_path, {key: value})])
            assert same(get(from_file, key), value)


def test_an_integer_is_a_number(tmp_path: Path) -> None:
    for flag in ("--training.max_norm=2", toml_file(tmp_path, {"training.max_norm": 2})):
        assert ConfigManager().parse_args([flag]).training.max_norm == 2.0


def test_one_file_with_every_key(tmp_path: Path) -> None:
    values = {key: values[-1] for key, values in KEYS.items()}
    config = ConfigManager().parse_args([toml_file(tmp_path, values)])
    assert {key: get(config, key) for key in KEYS} == values


@pytest.mark.parametrize("key", [key for key, values in KEYS.items() if isinstance(values[0], bool)])
def test_boolean_flags(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    for value in (True, False):
        opposite = toml_file(tmp_path, {key: not value})
        bare = f"--{key}" if value else f"--{section}.no_{name}"
        for flag in (bare, f"--{key}={str(value).lower()}"):
            assert get(ConfigManager().parse_args([opposite, flag]), key) is value


TAKE_URIS = ("checkpoint.folder", "checkpoint.initial_load_path")
NO_PATH = "checkpoint.continue_from_path"
PATHS = [
    key for key in fields_by_key(JobConfig) if key.endswith(("folder", "_path", "_csv", "_file")) and key != NO_PATH
]


@pytest.mark.parametrize("key", PATHS)
def test_a_path_is_expanded_and_a_uri_kept_or_not(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").touch()
    for argument in (f"--{key}=~/mine", toml_file(tmp_path, {key: "~/mine"})):
        if key != "job.config_file":
            assert get(ConfigManager().parse_args([argument]), key) == str(tmp_path / "mine")
    assert ConfigManager().parse_args(["--job.config_file=~/mine"]).job.config_file == str(tmp_path / "mine")
    if key in TAKE_URIS or key.endswith(("dataset_path", "tokenizer_path")):
        for argument, kept in (("s3://bucket/a", "s3://bucket/a"), (f"file://{tmp_path}/a", f"{tmp_path}/a")):
            assert get(ConfigManager().parse_args([f"--{key}={argument}"]), key) == kept
    else:
        with pytest.raises(ConfigError, match=rf"{key}\b.* path on this machine.*") as caught:
            ConfigManager().parse_args([f"--{key}=s3://bucket/run"])
        assert len(caught.value.problems) == 1


DUMP_FOLDER = "a path on this machine (checkpoint.folder takes a URI, to keep checkpoints elsewhere)"
TOKENS = "a number of tokens with K, M, B or T, such as 10B"
WRONG = [  # key, value in TOML, the expectation that the message must state
    ("training.steps", 0, "an integer above 0"),
    ("training.steps", "10", "an integer above 0"),
    ("training.steps", 5.5, "an integer above 0"),
    ("training.steps", True, "an integer above 0"),
    ("training.seq_len", -1, "an integer above 0"),
    ("training.global_batch_size", 0, '-1, an integer above 0, or sizes and where they begin, such as "64@0, 128@2B"'),
    ("parallelism.data_parallel_shard_degree", -2, "-1 or an integer above 0"),
    ("checkpoint.load_step", -2, "-1 or a step"),
    ("optimizer.muon_coefficients", [1.0, 2.0], "a list of 3 finite numbers"),
    ("training.local_batch_size", 0, "an integer above 0"),
    ("training.max_norm", 0, "a number above 0"),
    ("training.max_norm", "1.0", "a number above 0"),
    ("training.seed", -1, "an integer of at least 0 and below 9223372036854775808"),
    ("training.compile", "true", "true or false"),
    ("training.compile", 1, "true or false"),
    ("training.mixed_precision_param", "float16", "one of auto, bfloat16, float32"),
    ("training.mixed_precision_reduce", "float16", "one of float32, bfloat16"),
    ("optimizer.lr", -1e-3, "a number above 0 and at most 100"),
    ("optimizer.lr", float("nan"), "a number above 0 and at most 100"),
    ("optimizer.lr", float("inf"), "a number above 0 and at most 100"),
    ("optimizer.lr", 1e30, "a number above 0 and at most 100"),
    ("optimizer.beta1", 1.0, "a number of at least 0 and below 1"),
    ("optimizer.beta2", 1.5, "a number of at least 0 and below 1"),
    ("optimizer.eps", float("inf"), "a number above 0 and at most 1"),
    ("optimizer.weight_decay", -0.1, "a number of at least 0 and at most 100"),
    ("optimizer.weight_decay", float("inf"), "a number of at least 0 and at most 100"),
    ("training.seed", 2**63, "an integer of at least 0 and below 9223372036854775808"),
    ("training.dataset_path", "", "a string that is not empty, or none"),
    ("comm.init_timeout_seconds", 10**14, "an integer above 0 and at most 31536000"),
    ("comm.train_timeout_seconds", 10**10, "an integer above 0 and at most 31536000"),
    ("comm.trace_buf_size", 10**14, "an integer of at least 0 and at most 10000000"),
    ("job.simulate_world_size", 10**6, "an integer above 0 and at most 65536, or none"),
    ("lr_scheduler.warmup_steps", -1, "an integer of at least 0"),
    ("lr_scheduler.decay_ratio", 1.1, "a number of at least 0 and at most 1, or none"),
    ("lr_scheduler.decay_type", "cos", "one of linear, sqrt, cosine, power"),
    ("model.name", 3, "a string"),
    ("model.converters", [8], "a list of strings"),
    ("metrics.log_freq", 0, "an integer above 0"),
    ("checkpoint.keep_latest_k", -1, "an integer of at least 0"),
    *(
        ("checkpoint.keep_every", value, f"an integer above 0 or {TOKENS}, or none")
        for value in (0, "0B", "1e400B", "B", "ten", 2.5, "1_0B")
    ),
    ("float8.recipe_name", "columnwise", "one of tensorwise, rowwise, rowwise_with_gw_hp, blockwise, delayed, or none"),
    ("parallelism.tensor_parallel_degree", 0, "an integer above 0"),
    ("parallelism.pipeline_parallel_layers_per_stage", 0, "an integer above 0, or none"),
    ("parallelism.context_parallel_rotate_method", "ring", "one of allgather, alltoall"),
    ("experimental.custom_args_module", 5, "a string"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_wrong_value_in_file(key: str, value: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args([toml_file(tmp_path, {key: value})])
    assert str(caught.value) == f"{tmp_path / 'run.toml'}: {key} must be {expected}, not {value!r}."


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--training.steps=many", "an integer above 0"),
        ("--training.steps=0", "an integer above 0"),
        ("--training.compile=1", "true or false"),
        ("--training.compile=", "true or false"),
        ("--optimizer.lr=none", "a number above 0 and at most 100"),
        ("--optimizer.lr=", "a number above 0 and at most 100"),
        ("--job.dump_folder=", DUMP_FOLDER),
        ("--job.dump_folder=s3://bucket/run", DUMP_FOLDER),
        ("--training.dataset_path=", "a string that is not empty, or none"),
        ("--checkpoint.folder=", "a path in job.dump_folder, an absolute one, or a URI such as s3://bucket/run"),
        ("--job.dump_folder=~nobody-of-this-name/run", DUMP_FOLDER),
        ("--lr_scheduler.decay_type=", "one of linear, sqrt, cosine, power"),
    ],
)
def test_wrong_value_on_command_line(flag: str, expected: str) -> None:
    key, value = flag.split("=")
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args([flag])
    assert str(caught.value) == f"{key} must be {expected}, not {value!r}."
