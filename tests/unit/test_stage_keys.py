"""[[stage]]: what files and flags mean, and one sentence for each mistake, before step 1."""

import re
from pathlib import Path

import pytest
from runs import TINY, into, train, train_here

from torchtitan.checks.config_checks import check, check_run
from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.engine.stages import parse_stages, sizes_without_steps
from torchtitan.errors import ConfigError, UserError
from torchtitan.logging import logger
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.planner import check_memory_of_stages

STAGES = """
[training]
global_batch_size = "4@0, 8@6, 4@7"
local_batch_size = 2
seq_len = 64
steps = 10
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.0
[[stage]]
name = "stable"
until = 0.3
[[stage]]
name = "long"
until = "3.5K"
training.seq_len = 128
[[stage]]
name = "anneal"
lr_scheduler.warmup_steps = 0
lr_scheduler.decay_ratio = 1.0
"""


def parse(folder: Path, text: str, *flags: str) -> JobConfig:
    (folder / "run.toml").write_text(text)
    return ConfigManager().parse_args([f"--job.config_file={folder / 'run.toml'}", *flags])


def steps_of(config: JobConfig) -> list[tuple[str, int, int | str, int]]:
    return [
        (stage.title, stage.last_step, stage.config.training.global_batch_size, stage.config.training.seq_len)
        for stage in parse_stages(config)
    ]


def test_at_a_boundary_only_what_has_changed_is_logged(tmp_path: Path) -> None:
    output = train(*TINY, "--training.steps=3", "--training.global_batch_size=4@0, 8@1, 4@2", into(tmp_path))
    counts = {
        name: len(re.findall(rf"^[-\d]+ [:\d]+ {name} ", output, re.MULTILINE)) for name in ("layout", "batch", "steps")
    }
    assert counts == {"layout": 1, "batch": 3, "steps": 3}, output


def test_a_size_of_batches_that_never_begins_is_said(tmp_path: Path) -> None:
    flags = (*TINY, "--training.steps=2", "--training.global_batch_size=4@0, 8@1, 16@99")
    line = "global_batch_size = 4@0, 8@1, 16@99: no step of this run has batches of 16, since it ends before they begin"
    output = train(*flags, into(tmp_path))
    assert output.count("WARNING") == 1 and line in output
    # In some stage each size of STAGES is reached, until the run is shorter.
    for steps, missing in ((10, 0), (6, 1)):
        config = parse(tmp_path, STAGES.replace('"3.5K"', "0.9"), f"--training.steps={steps}")
        assert len(sizes_without_steps(config, parse_stages(config))) == missing


def test_fractions_tokens_and_sizes_of_batches(tmp_path: Path) -> None:
    stages = parse_stages(parse(tmp_path, STAGES))
    # 3 x 256 tokens, 3 x 512, 1024, and 512 for the rest of 3500
    assert steps_of(parse(tmp_path, STAGES)) == [
        ("stage stable", 3, 4, 64),
        ("stage long", 6, 4, 128),
        ("stage long", 7, 8, 128),
        ("stage long", 8, 4, 128),
        ("stage anneal", 10, 4, 64),
    ]
    assert [stage.at_end for stage in stages] == [True, False, False, True, True]
    rates = [stage.learning_rate(step) / stage.config.optimizer.lr for stage, step in ((stages[0], 1), (stages[1], 4))]
    assert rates == [0.5, 1.0]
    assert [stages[-1].learning_rate(step) for step in (9, 10)] == pytest.approx([8e-4, 4e-4])


def test_flags_by_the_name_of_a_stage(tmp_path: Path) -> None:
    config = parse(
        tmp_path, STAGES, "--stage.long.until=6", "--stage.anneal.training.seq_len=32", "--training.seq_len=16"
    )
    assert steps_of(config)[:2] == [("stage stable", 3, 4, 16), ("stage long", 6, 4, 128)]
    assert {stage.config.training.seq_len for stage in parse_stages(config) if stage.number == 3} == {32}


def test_the_resolved_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = parse(tmp_path, STAGES)
    again = parse(tmp_path, to_toml(config))
    assert again == config and len(again.stage.entries) == 3
    assert to_toml(config).count("[[stage]]") == 3  # as a user would write it
    assert "[stage" not in to_toml(parse(tmp_path, ""))


def test_groups_of_parameters_in_a_stage(tmp_path: Path) -> None:
    group = """optimizer.group = [{parameters = ["*norm*"], lr = 0.1}]"""
    config = parse(tmp_path, TWO.format(5, group, ""))
    (first, second) = (stage.config.optimizer.group for stage in parse_stages(config))
    assert [(entry.parameters, entry.lr) for entry in first] == [(["*norm*"], 0.1)] and second == []
    assert parse(tmp_path, to_toml(config)) == config
    with pytest.raises(
        ConfigError, match=r"\[\[stage\]\] 1: \[\[optimizer.group\]\] 1: unknown key lrr \(did you mean lr"
    ):
        parse(tmp_path, TWO.format(5, group.replace("lr =", "lrr ="), ""))


def test_keys_without_effect_in_one_stage_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = parse(tmp_path, TWO.format(5, "float8.emulate = true", "model.converters = ['float8']"), into(tmp_path))
    with caplog.at_level("INFO", logger.name):
        check(config, 1, "cpu")
    assert "stage a: float8.emulate: no effect in this run without float8 in model.converters" in caplog.text


TWO = "[training]\nsteps = 10\n[[stage]]\nname = 'a'\nuntil = {}\n{}\n[[stage]]\nname = 'b'\n{}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TWO.format(5, "", "until = 3") + "[[stage]]\nname = 'c'",
            "stage b: it ends at step 3 of 10, but the one before it ends at step 5",
        ),
        (TWO.format(12, "", ""), "stage a: it ends at step 12, after training.steps = 10"),
        (TWO.format(5, "", "until = 8"), "stage b: the last one ends at step 8 of 10"),
        (TWO.format("'none'", "", ""), "stage a: it has no end; set until: a step, a fraction"),
        (
            TWO.format(5, "lr_scheduler.total_steps = 4", ""),
            "stage a: lr_scheduler.total_steps = 4 is fewer than the 5 steps that are trained with the schedule",
        ),
        (TWO.format(5, "training.seed = 3", ""), "stage a: training.seed cannot change within a run; remove it"),
        (TWO.format(5, "training.seq_lem = 3", ""), "[[stage]] 1: unknown key training.seq_lem (did you mean"),
        (TWO.format(5, "", "").replace("'b'", "'a'"), "stage a: the name a is another stage's"),
        (TWO.format(5, "", "") + "[[precision.phase]]", "[[stage]] and [[precision.phase]] exclude each other"),
        ("[stage]\nname = 'a'", "[stage] is one table, but stages are a list of them; write [[stage]]"),
        (TWO.format("2.0", "", ""), "[[stage]] 1: until must be a step, a fraction of training.steps"),
        (
            TWO.format(5, "", "").replace("steps = 10", "steps = 10\nglobal_batch_size = '4@2'"),
            "global_batch_size must be",
        ),
    ],
)
def test_a_mistake_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parse_stages(parse(tmp_path, text))
    assert len(error.value.problems) == 1 and message in error.value.problems[0]


def test_a_flag_for_no_stage(tmp_path: Path) -> None:
    known = r"unknown flag --stage\.anneel\.training\.seq_len \(did you mean stage\.anneal\.training\.seq_len\?\)"
    with pytest.raises(ConfigError, match=known):
        parse(tmp_path, STAGES, "--stage.anneel.training.seq_len=32")


def test_a_batch_that_the_ranks_do_not_divide(tmp_path: Path) -> None:
    text = TWO.format(5, "", "training.global_batch_size = 6").replace("steps = 10", "steps = 10\nlocal_batch_size = 2")
    with pytest.raises(ConfigError) as error:
        check(parse(tmp_path, text, into(tmp_path)), 2, "cpu")
    assert len(error.value.problems) == 1 and error.value.problems[0].startswith("stage b: training.global_batch_size")


def test_data_of_a_later_stage_are_opened_before_step_1(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "one document"}\n')
    for name in ("few", "missing"):
        data = f"training.dataset_mixture = ['{tmp_path / name}.jsonl:1']"
        (tmp_path / "run.toml").write_text(TWO.format(5, "", data))
        with pytest.raises(UserError, match=rf"^stage b: .*{name}\.jsonl"):
            train_here(*TINY, into(tmp_path / "dump"), f"--job.config_file={tmp_path / 'run.toml'}")
    assert not (tmp_path / "dump" / "metrics.jsonl").exists()


@pytest.mark.full
def test_a_start_compares_the_memory_of_each_stage_with_the_device(tmp_path: Path) -> None:
    """Before step 1, in the process that trains then."""
    large = ("--stage.long.training.local_batch_size=524288", "--stage.long.training.global_batch_size=524288")
    config = parse(tmp_path, STAGES, "--stage.long.until=8", *large)
    with pytest.raises(ConfigError) as error:
        dims, stages = check_run(config, 1, "cuda")
        check_memory_of_stages(stages, dims, named_device("H100"))
    assert len(error.value.problems) == 1
    assert re.match(r"stage long needs about [\d,]+ GiB, and .*H100.* has 80; lower its", error.value.problems[0])
    train_here(*TINY, into(tmp_path), "--training.steps=2")
