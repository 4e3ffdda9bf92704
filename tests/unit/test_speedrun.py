"""`benchmarks/speedrun.py`, and that train_configs/speedrun_cpu.toml is what it found."""

import dataclasses
import json
from pathlib import Path

from benchmarks import speedrun
from benchmarks.runs import DEBUG_MODEL
from torchtitan.config import ConfigManager, JobConfig

FILE = DEBUG_MODEL.with_name("speedrun_cpu.toml")


def test_the_file_is_the_debug_model_with_all_adopted_changes() -> None:
    from_file = ConfigManager().parse_args([f"--job.config_file={FILE}"])
    flags = speedrun.arguments_of(speedrun.recipes()[speedrun.LAST].keys, from_file.training.steps)
    expected = ConfigManager().parse_args([f"--job.config_file={DEBUG_MODEL}", *flags])

    def trains(config: JobConfig) -> dict[str, object]:
        sections = dataclasses.asdict(config)
        sections["training"].pop("steps")
        return {name: sections[name] for name in ("model", "training", "optimizer", "lr_scheduler", "precision")}

    assert trains(from_file) == trains(expected)


def test_the_debug_models_file_has_the_batch_that_helped() -> None:
    file = f"--job.config_file={DEBUG_MODEL}"
    recipe = speedrun.recipes()["16 sequences a step"].keys
    flags = [f"--{key}={value}" for key, value in recipe.items()]
    assert ConfigManager().parse_args([file, *flags]) == ConfigManager().parse_args([file])


def test_a_change_that_costs_no_time_has_the_steps_of_the_recipe_before_it(tmp_path: Path) -> None:
    adopted = [change.name for change in speedrun.CHANGES if change.adopted]
    (tmp_path / "seconds.json").write_text(json.dumps({adopted[0]: 0.5, "Muon at 4e-3": 1, adopted[-1]: 0.25}))
    steps = speedrun.steps_that_fit(1, ["AdamW at 6e-3", "Muon at 8e-3", speedrun.LAST], tmp_path)
    assert steps == {"AdamW at 6e-3": 120, "Muon at 8e-3": 60, speedrun.LAST: 240}


def test_a_change_is_compared_at_equal_time_with_the_recipe_before_it(tmp_path: Path) -> None:
    names = [speedrun.FIRST, speedrun.CHANGES[0].name]
    seconds = {names[0]: 0.5, names[1]: 0.25}
    (tmp_path / "seconds.json").write_text(json.dumps(seconds))
    for number, name in enumerate(names):
        steps = round(60 / seconds[name])
        for seed in range(2):
            run = f"{name} 1 min" + (f" seed {seed}" if seed else "")
            dump = tmp_path / run.replace(" ", "_")
            dump.mkdir()
            result = {"step": steps, speedrun.HELD_OUT: (2 + seed) * (0.9, 0.8)[seed] ** number}
            (dump / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, 'loss': 5})}\n{json.dumps(result)}\n")
    lines = speedrun.table(names, 1, 2, tmp_path).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        [names[0], "120", "2.5000", "", "", ""],
        [names[1], "240", "2.1000", "-15.00%", "7.07", "yes"],
    ]
