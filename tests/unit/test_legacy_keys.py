"""Files and flags of other versions load, keep their meaning, and are reported in one line each."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.fields import fields_by_key
from torchtitan.config.legacy_checks import LegacyChecks
from torchtitan.config.legacy_keys import LEGACY_KEYS, LEGACY_VALUES, RULES
from torchtitan.config.manager import WITH_RULES, ValueChecks, build, tomllib, values_of_file
from torchtitan.errors import ConfigError

ROOT = Path(__file__).parents[2]
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
    assert config.validation.steps == -1 and config.optimizer.state_dtype == "bfloat16"
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
    ("section", "line", "message"),
    [
        ("training", "batch_size = 0", "training.batch_size must be an integer above 0, not 0."),
        (
            "checkpoint",
            "interval_type = 'seconds'",
            "is not supported: the interval is always in steps; set checkpoint.interval",
        ),
        ("parallelism", "expert_tensor_parallel_degree = 2", "but not divided"),
        ("compile", "components = 3", "it must be a list, of model and loss."),
        ("training", "dtype = 's3://bucket/key'", "training.dtype must be one of float32, bfloat16"),
        ("experimental", "pipeline_parallel_microbatches = 3", "it must divide training.local_batch_size = 8."),
        ("checkpoint", "initial_load_in_hf = true", "set checkpoint.initial_load_path"),
        ("training", "warmup_pct = 20", "a fraction of training.steps"),
        ("compile", "mode = 'x'", "unknown key compile.mode"),
        ("fault_tolerance", "enable = true", "is not supported: TorchFT"),
        ("quantize.linear.float8", "nosuch = 1", "unknown key quantize.linear.float8.nosuch"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(section: str, line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"[{section}]\n{line}\n")
    assert message in str(caught.value) and len(caught.value.problems) == 1


KEYS = fields_by_key(JobConfig)
# Key -> the default there, then other values.
OF_OTHER_VERSIONS = tomllib.loads((Path(__file__).parent / "keys_of_other_versions.toml").read_text())


@pytest.mark.parametrize("key", OF_OTHER_VERSIONS)
def test_every_key_that_ever_was_acts_or_is_reported(key: str) -> None:
    for place, value in enumerate(OF_OTHER_VERSIONS[key]):
        table = value
        for name in reversed(key.split(".")):
            table = {name: table}
        notices: list[str] = []
        problems: list[str] = []
        checks = LegacyChecks(KEYS, problems, notices)  # without a parser of flags, which takes its time
        values = values_of_file("run.toml", table, checks)
        checks.finish(values)
        if problems:
            assert place > 0, "the default is refused"
            assert len(problems) == 1 and key in problems[0]
        elif key in KEYS:
            as_here = value in (get(JobConfig(), key), "none")
            assert place == 0 or as_here or notices or build(JobConfig, values) != JobConfig()
        else:
            assert any(f"run.toml: {key} " in notice for notice in notices)
            assert place > 0 or not any("is now" in notice and "= true" in notice for notice in notices)


def get(config: JobConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_the_table_of_defaults_that_differ_is_complete() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page.split("## Where a default differs")[1].split("\nThese keys behave")[0]
    listed = dict(re.findall(r"^\| `([a-z_0-9.]+)`(?: \(new\))? \| `?(.*?)`?(?::.*?)? \| ", section, re.MULTILINE))
    new = set(re.findall(r"`([a-z_0-9.]+)` \(new\)", section))
    defaults = {key: values[0] for key, values in OF_OTHER_VERSIONS.items() if key in KEYS}
    differ = {
        key for key, value in defaults.items() if value != ("none" if KEYS[key].default is None else KEYS[key].default)
    }
    assert listed.keys() - new == differ
    assert not new & defaults.keys()
    assert listed == {key: KEYS[key].shown_default for key in listed}


def test_the_list_of_keys_is_complete() -> None:
    only_here = LEGACY_KEYS.keys() - OF_OTHER_VERSIONS.keys()
    # other spellings of a table whose keys are listed; a module that would be imported
    others = {"job.custom_config_module", "precision.converters"}  # the second is how our own first stages had it
    assert all(key.startswith("quantize.") or key in others for key in only_here), only_here
    assert not LEGACY_KEYS.keys() & KEYS.keys()


# File, keys that it must lead to, part of a notice.
MEANINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "float8 of March 2024": (
        "[training]\nfp8_linear = 'dynamic'",
        {"model.converters": ["float8"]},
        "training.fp8_linear is now model.converters = [float8]",
    ),
    "no float8": ("[training]\nfp8_linear = ''", {"model.converters": []}, 'fp8_linear = "" changes nothing here'),
    "false": ("[float8]\nenable_float8_linear = false", {"model.converters": []}, "_linear = false changes nothing"),
    "no checkpoints": (
        "[checkpoint]\nfolder = ''",
        {"checkpoint.enable_checkpoint": False, "checkpoint.folder": "checkpoint"},
        'checkpoint.folder = "" is now checkpoint.enable_checkpoint = false',
    ),
    "checkpoints by their folder": (
        "[checkpoint]\nfolder = 'saved'\n[training]\nsequence_parallel_degree = 1",
        {"checkpoint.enable_checkpoint": True, "checkpoint.folder": "saved", "checkpoint.keep_latest_k": 0},
        "checkpoint.folder: is now checkpoint.enable_checkpoint = true",
    ),
    "all checkpoints": (
        "[checkpoint]\nenable_checkpoint = true\n[training]\nwarmup_steps = 2",
        {"checkpoint.keep_latest_k": 0},
        "all checkpoints are kept, as before March 2025",
    ),
    "10 checkpoints": (
        "[checkpoint]\nenable = true\n[training]\nlocal_batch_size = 2",
        {"checkpoint.keep_latest_k": 10},
        "checkpoint.enable is now checkpoint.enable_checkpoint",
    ),
    "a list as text": (
        "[model]\nconverters = 'quantize.dense.float8, mx'\n[float8]\nfilter_fqns = 'output'",
        {"model.converters": ["float8", "mx"], "float8.filter_fqns": ["output"]},
        "model.converters = quantize.dense.float8, mx is now a list",
    ),
    "tables of September 2025": (
        "[quantize.dense.mx]\nrecipe_name = 'mxfp8_cublas'\n[quantize.moe.mx]\nfqns = ['experts']",
        {"mx.recipe_name": "mxfp8", "mx.scale_calculation_mode": "floor"},
        "quantize.dense.mx.recipe_name is now mx.recipe_name",
    ),
    "only the loss compiled": (
        "[compile]\nenable = true\ncomponents = ['loss']",
        {"training.compile": False},
        "compile.components is now training.compile = false",
    ),
    "nothing compiled": (
        "[compile]\nenable = false\ncomponents = 'loss'",
        {"training.compile": False},
        "compile.enable is now training.compile",
    ),
    "a sparse Qwen3": (
        "[model]\nname = 'qwen3'\nflavor = 'debugmodel_moe'",
        {"model.name": "qwen3_moe", "model.flavor": "debugmodel"},
        "model.name = qwen3, model.flavor = debugmodel_moe: is now model.name = qwen3_moe",
    ),
    "early steps": (
        "[optimizer]\nearly_step_in_backward = true\n[training]\nmax_norm = 1.0",
        {"training.max_norm": math.inf, "training.skip_nonfinite": False},
        "gradients are not clipped (training.max_norm = inf), and no step is skipped",
    ),
    "micro-batches": (
        "[experimental]\npipeline_parallel_microbatches = 4\n[training]\nbatch_size = 12",
        {"parallelism.pipeline_parallel_microbatch_size": 3},
        "is now parallelism.pipeline_parallel_microbatch_size",
    ),
    "a share of warm-up": (
        "[training]\nwarmup_pct = 0.1\nsteps = 50",
        {"lr_scheduler.warmup_steps": 5},
        "training.warmup_pct is now lr_scheduler.warmup_steps",
    ),
    "replicas": (
        "[training]\ndata_parallel_type = 'ddp'\ndata_parallel_degree = 4",
        {"parallelism.data_parallel_replicate_degree": 4, "parallelism.data_parallel_shard_degree": 1},
        "training.data_parallel_type is now",
    ),
    "replicas on all processes": (
        "[training]\ndata_parallel_type = 'ddp'\ntensor_parallel_degree = 2\n[job]\nsimulate_world_size = 16",
        {"parallelism.data_parallel_replicate_degree": 8, "parallelism.data_parallel_shard_degree": 1},
        "training.data_parallel_type is now",
    ),
    "published weights": (
        "[checkpoint]\ninitial_load_in_hf = true\n[model]\nhf_assets_path = 'assets'",
        {"checkpoint.initial_load_path": "assets", "model.tokenizer_path": "assets"},
        "initial_load_in_hf is now checkpoint.initial_load_path = model.hf_assets_path",
    ),
    "published weights of another path": (
        "[checkpoint]\ninitial_load_in_hf = true\ninitial_load_path = 'x'\n[model]\nhf_assets_path = 'assets'",
        {"checkpoint.initial_load_path": "x"},
        "initial_load_in_hf = true changes nothing here",
    ),
    "moments in bfloat16": (
        "[training]\ndtype = 'bfloat16'",
        {"training.weight_dtype": "bfloat16", "optimizer.state_dtype": "bfloat16"},
        "training.dtype is now training.weight_dtype and optimizer.state_dtype",
    ),
    "Llama 3.1 as Llama 3": (
        "[model]\nname = 'llama3'\nflavor = '8B'\n[compile]\nenable = true",
        {"model.name": "llama3"},
        'model.flavor = 8B: RoPE is not scaled, as in Llama 3; .* set model.name = "llama3.1"',
    ),
    "a plan by another name": (
        "[memory_estimation]\nenabled = true\n[job]\nplan = false",
        {"job.plan": True},
        "memory_estimation.enabled is now job.plan",
    ),
    "no plan": ("[memory_estimation]\nenabled = false\n[job]\nplan = true", {"job.plan": True}, "changes nothing here"),
    "a tracker by a key of its own": (
        "[metrics]\nenable_wandb = true\ntrackers = ['mlflow']",
        {"metrics.trackers": ["mlflow", "wandb"]},
        "metrics.enable_wandb is now wandb in metrics.trackers",
    ),
    "the whole validation set": ("[validation]\nenable = true\nsteps = -1", {"validation.steps": -1}, ""),
    "two keys": (
        "[training]\nbatch_size = 2\nlocal_batch_size = 3",
        {"training.local_batch_size": 3},
        "training.local_batch_size = 3 is set too, and wins",
    ),
    "a key and a value": (
        "[mx]\nscale_calculation_mode = 'rceil'\nrecipe_name = 'mxfp8_cublas'",
        {"mx.scale_calculation_mode": "rceil"},
        "mx.scale_calculation_mode = rceil is set too, and wins",
    ),
    "experts in bfloat16": (
        "[model]\nname = 'qwen3'\nflavor = '30B-A3B'\nconverters = ['quantize.linear.float8']",
        {"model.converters": ["float8"], "float8.filter_fqns": ["output", "moe.experts"]},
        "experts are not converted (float8.filter_fqns has moe.experts)",
    ),
    "experts and linear layers": (
        "[model]\nname = 'qwen3_moe'\nconverters = ['quantize.grouped_mm.mx', 'quantize.linear.mx']",
        {"model.converters": ["mx"], "mx.filter_fqns": ["output"]},
        "model.converters = quantize.grouped_mm.mx is now model.converters = mx",
    ),
    "only experts": (
        "[model]\nname = 'qwen3_moe'\nconverters = ['quantize.moe.mx']\n[mx]\nfilter_fqns = []",
        {"model.converters": ["mx"], "mx.filter_fqns": ["attention"]},
        "other layers than experts are not converted",
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_what_a_file_means(name: str, tmp_path: Path) -> None:
    text, expected, wanted = MEANINGS[name]
    config, notices = load(tmp_path, text)
    assert {key: get(config, key) for key in expected} == expected
    assert any(re.search(re.escape(wanted).replace(r"\.\*", ".*"), notice) for notice in notices or [""]), notices


@pytest.mark.parametrize(
    "text",
    [
        "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 2",
        "[model]\nname = 'qwen3'\nflavor = '8B'",
        "[checkpoint]\nenable_checkpoint = true",
    ],
)
def test_a_file_without_a_date_is_read_without_a_word(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, text)[1] == []


def test_a_legacy_key_depends_on_flags_too(tmp_path: Path) -> None:
    text = "[metrics]\nenable_wandb = true"
    assert load(tmp_path, text, "--metrics.trackers=mlflow")[0].metrics.trackers == ["mlflow", "wandb"]
    assert load(tmp_path, text, "--metrics.no_enable_wandb")[0].metrics.trackers == []
    text = "[training]\nwarmup_pct = 0.5\nsteps = 10"
    assert load(tmp_path, text, "--training.steps=40")[0].lr_scheduler.warmup_steps == 20
    assert load(tmp_path, text, "--lr_scheduler.warmup_steps=3")[0].lr_scheduler.warmup_steps == 3
    text = "[lr_scheduler]\nwarmup_steps = 3"
    assert load(tmp_path, text, "--training.warmup_pct=0.001")[0].lr_scheduler.warmup_steps == 10
    with pytest.raises(
        ConfigError,
        match=r"--checkpoint\.folder must be a path in job.dump_folder, .*, not ''",
    ):
        load(tmp_path, "", "--checkpoint.folder=")  # as from an unset shell variable


def test_a_rule_that_needs_no_legacy_key_is_looked_at() -> None:
    for rule in (rule for rule in RULES if not rule.seen):
        assert any(all(rule.when.get(key) in meant for key, meant in values.items()) for values in WITH_RULES)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in LEGACY_VALUES.items() for value in values])
def test_a_legacy_value_is_looked_at_because_its_key_refuses_it(key: str, value: str) -> None:
    checks = ValueChecks(KEYS)
    checks.values_of({key: [value] if KEYS[key].takes(list) else value}, False, "")
    assert len(checks.problems) == 1


def test_a_stage_may_have_them_too(tmp_path: Path) -> None:
    config, notices = load(tmp_path, "[[stage]]\ntraining.batch_size = 2\n")
    assert config.stage.entries[0].sections == {"training": {"local_batch_size": 2}}
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("in_file", "flags"),
    [
        ("model.converters = ['quantize.grouped_mm.mx']\n", ()),
        ("model.converters = 'int8, quantize.grouped_mm.mx'\n", ()),
        ("", ("--stage.long.model.converters=quantize.grouped_mm.mx",)),
    ],
)
def test_values_whose_meaning_depends_on_other_keys_are_refused_in_a_stage(
    in_file: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """In a whole file the name also leaves out all other layers than experts."""
    with pytest.raises(ConfigError, match=r"quantize\.grouped_mm\.mx is now model\.converters = mx; write it so"):
        load(tmp_path, f"[[stage]]\nname = 'long'\nuntil = 2\n{in_file}", *flags)


def test_a_file_of_today_does_not_load_the_tables_of_other_versions() -> None:
    """Neither do flags; README's first command is in `tests/end_to_end/test_loaded_modules.py`."""
    script = (
        "import sys; from torchtitan.config import ConfigManager;"
        "ConfigManager().parse_args(['--job.config_file=train_configs/debug_model.toml', '--training.steps=3']);"
        "print([name for name in sys.modules if name.startswith('torchtitan.config.legacy')])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
