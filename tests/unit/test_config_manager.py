"""How defaults, file and command line combine into one configuration, and the messages if they cannot."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.config import ConfigManager, to_toml
from torchtitan.config.manager import JobConfig, build
from torchtitan.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return f"--job.config_file={path}"


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args(argv)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 7\nseq_len = 64\n[model]\nconverters = ['a', 'b']\n")
    config = ConfigManager().parse_args(["--training.steps", "9", file, "--model.converters=c"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (9, 64, 8)
    assert config.model.converters == ["c"]  # replaced, not appended
    assert config.job.config_file == str(tmp_path / "run.toml")


def test_the_last_of_equal_flags_wins() -> None:
    config = ConfigManager().parse_args(["--training.steps=1", "--training.compile", "--training.steps=2"])
    assert config.training.steps == 2
    assert not ConfigManager().parse_args(["--training.compile", "--training.no_compile"]).training.compile


def test_flags_may_be_spelled_with_hyphens_and_come_after_two(tmp_path: Path) -> None:
    flags = ["--training.local-batch-size=3", "--training.compile", "--", "--activation-checkpoint.mode", "full"]
    config = ConfigManager().parse_args([*flags, "--training.no-compile", "--job.description=a-b --c-d"])
    assert config.training.local_batch_size == 3 and not config.training.compile
    assert config.activation_checkpoint.mode == "full" and config.job.description == "a-b --c-d"
    (tmp_path / "run.toml").write_text('[[stage]]\nname = "a-b"\n')
    file = f"--job.config_file={tmp_path / 'run.toml'}"
    (stage,) = ConfigManager().parse_args([file, "--stage.a-b.training.seq-len=64"]).stage.entries
    assert stage.name == "a-b" and stage.sections == {"training": {"seq_len": 64}}


def test_lists_are_one_comma_separated_value() -> None:
    filters = ConfigManager().parse_args(["--float8.filter_fqns=attention.wk, output,,"]).float8.filter_fqns
    assert filters == ["attention.wk", "output"]
    assert ConfigManager().parse_args(["--mx.filter_fqns="]).mx.filter_fqns == []


def test_a_list_that_begins_with_a_bracket_is_json() -> None:
    prompts = ConfigManager().parse_args(['--validation.sample_prompts= ["a, b", " c"]']).validation.sample_prompts
    assert prompts == ["a, b", " c"]
    assert ConfigManager().parse_args(["--float8.filter_fqns=[]"]).float8.filter_fqns == []
    assert ConfigManager().parse_args(["--optimizer.muon_coefficients=[3, -4.5, 2]"]).optimizer.muon_coefficients == [
        3.0,
        -4.5,
        2.0,
    ]
    old_name = ConfigManager().parse_args(['--experimental.pipeline_parallel_split_points=["layers.2"]'])
    assert old_name.parallelism.pipeline_parallel_split_points == ["layers.2"]
    [problem] = problems_of("--model.converters=" + "[" * 100_000)
    assert problem.startswith("--model.converters begins with [, so it must be JSON") and len(problem) < 300


def test_defaults_are_not_shared_between_configurations() -> None:
    ConfigManager().parse_args([]).model.converters.append("float8")
    assert ConfigManager().parse_args([]).model.converters == []


def test_none_is_written_as_a_word(tmp_path: Path) -> None:
    file = write(tmp_path, "[lr_scheduler]\ndecay_ratio = 0.5\n[model]\ntokenizer_path = 'x'\n")
    assert ConfigManager().parse_args([file, "--lr_scheduler.decay_ratio=none"]).lr_scheduler.decay_ratio is None
    assert (
        ConfigManager().parse_args([write(tmp_path, "[model]\ntokenizer_path = 'none'")]).model.tokenizer_path is None
    )


def test_configuration_is_frozen() -> None:
    config = ConfigManager().parse_args([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.steps = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training = config.training  # type: ignore[misc]


def test_negative_numbers_are_values() -> None:
    assert ConfigManager().parse_args(["--checkpoint.load_step", "-1"]).checkpoint.load_step == -1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainin]\nsteps = 1", "unknown section [trainin] (did you mean training?)."),
        ("[wholly_other]\nsteps = 1", "unknown section [wholly_other]."),
        ("[training]\nstep = 1", "unknown key training.step (did you mean training.steps?)."),
        ("[training]\nlog_freq = 1", "unknown key training.log_freq (did you mean metrics.log_freq?)."),
        ("[training]\nqqqqqqqq = 1", "unknown key training.qqqqqqqq."),
        ("training = 3", "[training] must be a table of keys, not 3."),
    ],
)
def test_bad_file(text: str, message: str, tmp_path: Path) -> None:
    assert problems_of(write(tmp_path, text)) == [f"{tmp_path / 'run.toml'}: {message}"]


@pytest.mark.parametrize("text", ["[training]\nsteps = ", "[training]\nsteps = 1\nsteps = 2", "[training", "steps: 1"])
def test_file_that_is_not_toml(text: str, tmp_path: Path) -> None:
    [problem] = problems_of(write(tmp_path, text), "--training.compile")
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/run.toml: invalid TOML: .+\(at .+\)\.", problem)


def test_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    [problem] = problems_of(write(tmp_path, "[model]\nconverters = " + "[" * 200_000))
    assert problem == f"{tmp_path / 'run.toml'}: invalid TOML: nested too deeply."


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[training]\nsteps = 3\n")
    assert ConfigManager().parse_args([f"--job.config_file={tmp_path / 'bom.toml'}"]).training.steps == 3


def test_a_file_that_comes_with_torchtitan_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3_0.6b", "qwen3_0.6b.toml"):
        assert ConfigManager().parse_args([f"--job.config_file={name}"]).model.name == "qwen3"
    [problem] = problems_of("--job.config_file=qwen3_8", "--training.compile")
    assert (
        "qwen3_8 not found" in problem and "did you mean qwen3_8b?" in problem and "debug_model, debug_moe" in problem
    )
    [problem] = problems_of("--job.config_file=train_configs/qwen3_8b.toml")  # as in a checkout
    assert problem.endswith("(did you mean qwen3_8b?).")
    (tmp_path / "qwen3_0.6b").write_text("[training]\nsteps = 7\n")  # the user's own file wins
    assert ConfigManager().parse_args(["--job.config_file=qwen3_0.6b"]).training.steps == 7


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    [problem] = problems_of(f"--job.config_file={tmp_path / 'none.toml'}")
    assert problem.startswith(f"job.config_file: {tmp_path / 'none.toml'} not found")
    [problem] = problems_of(f"--job.config_file={tmp_path}")
    assert problem == f"job.config_file: {tmp_path} cannot be read: Is a directory."
    (tmp_path / "latin.toml").write_bytes(b"[job]\ndescription = '\xe9'")
    [problem] = problems_of(f"--job.config_file={tmp_path / 'latin.toml'}")
    assert problem == f"{tmp_path / 'latin.toml'}: not UTF-8 text (invalid byte at offset 21)."
    [problem] = problems_of("--job.config_file=a\0b")
    assert problem == r"job.config_file: 'a\x00b' contains a zero byte, which no path can."
    os.mkfifo(tmp_path / "pipe.toml")
    [problem] = problems_of(f"--job.config_file={tmp_path / 'pipe.toml'}")
    assert problem == f"job.config_file: {tmp_path / 'pipe.toml'} cannot be read: it is a named pipe, not a file."


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training.step=5"], "Command line: unknown flag --training.step (did you mean training.steps?)."),
        (["--training.step", "5"], "Command line: unknown flag --training.step (did you mean training.steps?)."),
        (["--steps=5"], "Command line: unknown flag --steps (did you mean training.steps?)."),
        (["--training.no_steps"], "Command line: unknown flag --training.no_steps (did you mean training.steps?)."),
        (["steps=5"], "Command line: unexpected argument 'steps=5'; write flags as --section.key=value."),
        (["--training.steps=5", "6"], "Command line: unexpected argument '6'; write flags as --section.key=value."),
        (["--training.steps"], "Command line: argument --training.steps: expected one argument."),
        (["--job.config_file"], "Command line: argument --job.config_file: expected one argument."),
        (["--job.description=\udcff"], r"--job.description is not Unicode text: '\udcff'."),
        (
            ['--validation.sample_prompts=["a, b"'],
            '--validation.sample_prompts begins with [, so it must be JSON, such as ["a", "b, c"] '
            "(Expecting ',' delimiter: line 1 column 8 (char 7)).",
        ),
        (['--model.converters=["mx", 1]'], "--model.converters must be a list of strings, not ['mx', 1]."),
        ([r'--model.converters=["\ud800"]'], r"""--model.converters is not Unicode text: '["\\ud800"]'."""),
    ],
)
def test_bad_command_line(argv: list[str], message: str) -> None:
    assert problems_of(*argv) == [message]


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "[trainin]\nx = 1\n[model]\nflavour = '8B'\n[training]\nsteps = 'ten'\n")
    problems = problems_of(file, "--training.seq_len=0", "--nothing.like=it", "--lr_scheduler.decay_type=cos")
    named = ["[trainin]", "model.flavour", "training.steps", "--nothing.like", "--training.seq_len", "decay_type"]
    assert len(problems) == len(named)
    assert all(name in problem for name, problem in zip(named, problems, strict=True))
    assert len(problems_of(file, "--training.seq_len")) == 4  # a flag without a value hides no problem of the file


def resolved(config: JobConfig, folder: Path) -> JobConfig:
    path = folder / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    again = ConfigManager().parse_args([f"--job.config_file={path}"])
    return dataclasses.replace(again, job=dataclasses.replace(again.job, config_file=config.job.config_file))


def test_resolved_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    flags = [
        '--job.description=a "quoted" \\ back\\slash, ünïcode 日本',
        "--model.converters=float8,mx",
        "--parallelism.pipeline_parallel_schedule_csv=none",  # its default is not none
        "--lr_scheduler.decay_ratio=0.1",
        "--optimizer.lr=1e-20",
        "--training.max_norm=inf",
        "--training.compile",
    ]
    config = ConfigManager().parse_args(flags)
    assert resolved(config, tmp_path) == config
    assert 'pipeline_parallel_schedule_csv = "none"' in to_toml(config)


TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text.lower() != "none")
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "job.description": TEXT,
        "model.tokenizer_path": st.none() | TEXT.map(lambda text: "./" + text.replace("\0", "")),
        "model.converters": st.lists(TEXT),
        "optimizer.lr": st.floats(0, 100, exclude_min=True),
        "optimizer.beta1": st.floats(0, 1, exclude_max=True),
        "lr_scheduler.decay_ratio": st.none() | st.floats(0, 1),
        "lr_scheduler.decay_type": st.sampled_from(["linear", "sqrt", "cosine", "power"]),
        "training.max_norm": st.floats(min_value=0, exclude_min=True),
        "training.steps": st.integers(1, 2**62),
        "training.compile": st.booleans(),
        "parallelism.pipeline_parallel_layers_per_stage": st.none() | st.integers(1),
    },
)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(values=VALUES)
def test_round_trip_of_any_values(values: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = build(JobConfig, values)
    assert resolved(config, tmp_path_factory.getbasetemp()) == config


@pytest.mark.parametrize("key", ["training.steps", "metrics.enable_wandb", "training.warmup_pct"])
def test_an_integer_that_python_cannot_print_is_one_sentence(key: str, tmp_path: Path) -> None:
    """Of current keys, former ones, and former ones that depend on others; in a stage, too."""
    section, name = key.split(".")
    number = "0x" + "f" * 5000
    for text in (f"[{section}]\n{name} = {number}\n", f"[[stage]]\nuntil = 2\n{key} = {number}\n"):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError, match="has an integer of over 1,000 bits"):
            ConfigManager().parse_args([f"--job.config_file={tmp_path / 'run.toml'}"])
