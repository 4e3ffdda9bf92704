"""Files and flags of other versions load, keep their meaning, and are reported in one line each."""

from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.keys import fields_by_key
from torchtitan.config.legacy_keys import LEGACY_KEYS, LEGACY_VALUES
from torchtitan.errors import ConfigError

OF_2024 = """
[job]
use_for_integration_test = true
[profiling]
run_profiler = true
profile_every_x_iter = 7
[metrics]
enable_color_printing = false
rank_0_only = true
[model]
name = "llama"
norm_type = "compiled_rmsnorm"
[optimizer]
fused = true
[training]
batch_size = 4
warmup_steps = 3
data_parallel_degree = -1
tensor_parallel_degree = 2
enable_loss_parallel = true
[experimental]
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
interval_type = "steps"
model_weights_only = true
[float8]
enable_float8_linear = true
scaling_type_input = "delayed"
"""

OF_JUNE_2025 = """
[job]
use_for_integration_test = true
[lr_scheduler]
lr_min = 0.1
[training]
batch_size = 2
compile = false
[checkpoint]
enable_checkpoint = true
model_weights_only = false
"""

OF_AUTUMN_2025 = """
[job]
custom_config_module = ""
[model]
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["quantize.linear.float8"]
[lr_scheduler]
min_lr_factor = 0.1
[training]
dtype = "bfloat16"
[training.dataloader]
num_workers = 2
[parallelism]
expert_tensor_parallel_degree = 1
pipeline_parallel_first_stage_less_layers = 1
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "norm", "output"]]
[checkpoint]
enable = true
initial_load_model_only = false
last_save_model_only = false
last_save_in_hf = false
exclude_from_loading = ["lr_scheduler", "optimizer"]
[activation_checkpoint]
early_stop = false
[compile]
enable = true
components = ["model", "loss"]
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
steps = -1
[debug]
seed = 5
[fault_tolerance]
enable = false
semi_sync_method = "diloco"
"""


def load(tmp_path: Path, text: str, *flags: str) -> tuple[JobConfig, list[str]]:
    (tmp_path / "run.toml").write_text(text)
    manager = ConfigManager()
    return manager.parse_args([f"--job.config_file={tmp_path / 'run.toml'}", *flags]), manager.notices


def test_a_file_of_2024(tmp_path: Path) -> None:
    config, notices = load(tmp_path, OF_2024)
    assert config.profiling.enable_profiling and config.profiling.profile_freq == 7
    assert config.metrics.disable_color_printing and not config.metrics.save_for_all_ranks
    assert config.model.name == "llama2" and config.model.converters == ["float8"]
    assert config.training.local_batch_size == 4 and config.lr_scheduler.warmup_steps == 3
    assert config.parallelism.tensor_parallel_degree == 2 and not config.parallelism.disable_loss_parallel
    assert config.checkpoint.last_save_model_weights_only
    assert config.float8.cast_input == "delayed"
    assert f"{tmp_path / 'run.toml'}: training.batch_size is now training.local_batch_size" in notices
    assert len(notices) == 19  # one for each of them


def test_a_file_of_june_2025(tmp_path: Path) -> None:
    config, notices = load(tmp_path, OF_JUNE_2025)
    assert config.training.local_batch_size == 2 and config.lr_scheduler.lr_min == 0.1
    assert config.checkpoint.enable_checkpoint and not config.checkpoint.last_save_model_weights_only
    assert len(notices) == 3


def test_a_file_of_autumn_2025(tmp_path: Path) -> None:
    config, notices = load(tmp_path, OF_AUTUMN_2025)
    assert config.model.tokenizer_path == "./assets/hf/Llama-3.1-8B" and config.model.converters == ["float8"]
    assert config.lr_scheduler.lr_min == 0.1 and config.training.weight_dtype == "bfloat16"
    assert config.parallelism.pipeline_parallel_split_points == ["layers.1", "layers.3"]
    assert config.checkpoint.enable_checkpoint and not config.checkpoint.initial_load_model_weights_only
    assert config.checkpoint.exclude_from_loading == ["optimizer"]
    assert config.training.compile and config.training.seed == 5
    assert config.float8.recipe_name == "rowwise" and config.float8.filter_fqns == ["output"]
    assert config.validation.steps == JobConfig().validation.steps
    assert any("fault_tolerance.semi_sync_method has no effect here" in notice for notice in notices)


def test_flags(tmp_path: Path) -> None:
    flags = ["--compile.enable", "--checkpoint.no_enable", "--training.batch_size", "3", "--debug.seed=4"]
    flags += ["--model.flavor=debugmodel_flex_attn", "--mx.recipe_name=mxfp8_cublas"]
    config, notices = load(tmp_path, "[checkpoint]\nenable = true\n", *flags)
    assert config.training.compile and not config.checkpoint.enable_checkpoint
    assert config.training.local_batch_size == 3 and config.training.seed == 4
    assert config.model.flavor == "debugmodel" and config.training.document_mask
    assert config.mx.recipe_name == "mxfp8" and config.mx.scale_calculation_mode == "floor"
    assert "--compile.enable is now training.compile" in notices
    assert (
        "model.flavor = debugmodel_flex_attn is now model.flavor = debugmodel, training.document_mask = true" in notices
    )


def test_a_key_of_today_wins(tmp_path: Path) -> None:
    text = "[training]\nbatch_size = 2\nlocal_batch_size = 3\n"
    assert load(tmp_path, text)[0].training.local_batch_size == 3
    assert load(tmp_path, text, "--training.batch_size=4")[0].training.local_batch_size == 4  # flags override the file


def test_a_key_of_today_wins_over_what_a_legacy_value_implies(tmp_path: Path) -> None:
    lines = ("scale_calculation_mode = 'rceil'", "recipe_name = 'mxfp8_cublas'")
    for order in (lines, lines[::-1]):
        mx = load(tmp_path, "[mx]\n" + "\n".join(order))[0].mx
        assert (mx.recipe_name, mx.scale_calculation_mode) == ("mxfp8", "rceil")
    flags = ("--training.no_document_mask", "--model.flavor=debugmodel_flex_attn")
    for order in (flags, flags[::-1]):
        assert not load(tmp_path, "", *order)[0].training.document_mask


@pytest.mark.parametrize(
    ("section", "line", "said"),
    [
        ("training", "batch_size = 0", "training.batch_size must be an integer above 0, not 0."),
        (
            "checkpoint",
            "interval_type = 'seconds'",
            "is not supported: the interval is always in steps; set checkpoint.interval",
        ),
        ("parallelism", "expert_tensor_parallel_degree = 2", "but not divided"),
        ("compile", "components = ['loss']", "set training.compile = false."),
        ("compile", "components = 3", "set training.compile = false."),
        ("compile", "mode = 'x'", "unknown key compile.mode"),
        ("fault_tolerance", "enable = true", "is not supported: TorchFT"),
        ("quantize.linear.float8", "nosuch = 1", "unknown key quantize.linear.float8.nosuch"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(section: str, line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"[{section}]\n{line}\n")
    assert said in str(caught.value)


def test_every_former_key_leads_to_keys_that_are_there() -> None:
    keys = fields_by_key(JobConfig)
    samples: list[Any] = [True, False, 1, None, "", "steps", "fsdp", "rmsnorm", "inductor", "default", [], [["x"]]]
    samples += ["model,loss"]
    for name, former in LEGACY_KEYS.items():
        assert name not in keys, f"{name} is a key of today"
        translated = []
        for value in samples:
            try:
                translated.append(former.translate(value))
            except (ValueError, TypeError):
                continue
        assert translated, f"{name} takes no value at all"
        assert all(new in keys for values in translated for new in values)
    for name, values in LEGACY_VALUES.items():
        assert name in keys and all(other in keys for _, others in values.values() for other in others)
