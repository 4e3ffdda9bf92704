"""Ladders: shapes of wanted sizes, the fitted law, and what cannot be fitted."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.training import Model
from torchtitan.engine.model_args import find_model_args, sizes_of
from torchtitan.engine.stages import parse_stages
from torchtitan.errors import ConfigError, run_command
from torchtitan.models.llama.args import LLAMA3
from torchtitan.models.llama.model import Llama
from torchtitan.tools.ladder.__main__ import main
from torchtitan.tools.ladder.fit import FinishedRun, fit
from torchtitan.tools.ladder.runs import choose_runs, make_rung
from torchtitan.tools.ladder.shapes import find_shape, parse_number, shape_of, short

FILE = Path(__file__).parents[2] / "train_configs" / "ladder_cpu.toml"
TRUE = {"E": 0.6, "A": 30.0, "alpha": 0.35, "B": 90.0, "beta": 0.3}
NOISE = 0.003
SIZES = (3.3e5, 6.4e5, 1.2e6, 3e6)


def law(parameters: float, tokens: float) -> float:
    return TRUE["E"] + TRUE["A"] * parameters ** -TRUE["alpha"] + TRUE["B"] * tokens ** -TRUE["beta"]


def measured(points: list[tuple[float, float]], random: np.random.Generator) -> list[FinishedRun]:
    return [FinishedRun(n, d, law(n, d) * float(np.exp(random.normal(0, NOISE)))) for n, d in points]


GRID = [(n, d) for n in SIZES for d in (2.5e5, 5e5, 1e6, 2e6)]
RAY = [(n, 20 * n) for n in (*SIZES, 5e6, 7e6)]


@pytest.mark.full
def test_exact_losses_give_the_constants() -> None:
    fitted = fit([FinishedRun(n, d, law(n, d)) for n, d in GRID], bootstraps=2)
    assert {name: constant.value for name, constant in fitted.constants.items()} == pytest.approx(TRUE, rel=0.01)
    assert fitted.predict(1e8, 1e9).value == pytest.approx(law(1e8, 1e9), rel=1e-3)


def test_noisy_losses_give_constants_within_their_intervals() -> None:
    fitted = fit(measured(GRID, np.random.default_rng(0)), bootstraps=100)
    for name, constant in fitted.constants.items():
        assert constant.low <= TRUE[name] <= constant.high
        assert constant.low <= constant.value <= constant.high
    assert NOISE / 3 < fitted.error < NOISE * 3


def test_one_ratio_of_tokens_to_parameters_leaves_out_a_term() -> None:
    fitted = fit(measured(RAY, np.random.default_rng(0)), bootstraps=20)
    assert fitted.formula == "E + A / N^alpha"
    assert list(fitted.constants) == ["E", "A", "alpha"]
    assert fitted.predict(1e7, 2e8).value == pytest.approx(law(1e7, 2e8), rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("points", [RAY, GRID], ids=["3", "5"])
def test_intervals_cover_the_runs_that_they_predict(points: list[tuple[float, float]]) -> None:
    """Of 95% intervals, 20 miss 1 on average."""
    random = np.random.default_rng(1)
    target = (1e7, 2e8 if points is RAY else 2e6)
    covered = 0
    for _ in range(20):
        interval = fit(measured(points, random), bootstraps=60).predict(*target)
        covered += interval.low <= measured([target], random)[0].loss <= interval.high
    assert covered >= 17


@pytest.mark.parametrize("points", [RAY[:3], GRID[:4], [(n, d) for n in SIZES for d in (1e6, 2e6)]])
def test_too_few_runs_for_the_constants(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be fitted: . constants need"):
        fit([FinishedRun(n, d, law(n, d)) for n, d in points])


@pytest.mark.parametrize("size", ["0.3M", "1.2M", "3M", "10M", "1B"])
def test_shapes_have_the_size_and_the_proportions_of_the_flavor(size: str) -> None:
    model, flavor = Model(name="llama3", flavor="debugmodel"), LLAMA3["debugmodel"]
    shape = find_shape(model, parse_number(size, ""), 256)
    args: Any = sizes_of(Model(name="llama3", flavor="debugmodel", dim=shape.dim, n_layers=shape.n_layers))
    with torch.device("meta"):
        built = Llama(args.with_vocab_size(100))
    assert shape.parameters == sum(
        p.numel() for name, p in built.named_parameters() if name.startswith(("layers", "norm"))
    )
    assert shape.parameters == pytest.approx(parse_number(size, ""), rel=0.15)
    assert args.head_dim == flavor.head_dim
    assert args.ffn_dim / args.dim == flavor.ffn_dim / flavor.dim
    assert shape.dim / shape.n_layers == pytest.approx(flavor.dim / flavor.n_layers, rel=0.35)


def test_the_flavor_itself_is_found() -> None:
    model = Model(name="qwen3", flavor="debugmodel")
    base = shape_of(model, find_model_args(model), 128)
    assert find_shape(model, base.parameters, 128) == base


def test_width_and_depth_are_keys(tmp_path: Path) -> None:
    grouped = sizes_of(Model(name="llama3", flavor="8B", dim=1024, n_layers=3))
    assert (grouped.dim, grouped.n_layers, grouped.n_heads, grouped.n_kv_heads) == (1024, 3, 8, 2)
    flags = [f"--job.dump_folder={tmp_path}", "--model.dim=40"]
    with pytest.raises(ConfigError, match=r"model.dim = 40: .* multiples of 16"):
        check(ConfigManager().parse_args(flags), 1, "cpu")
    (tmp_path / "config.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\ndim = 64\n')
    with pytest.raises(
        ConfigError, match=r"with model.dim = 64, but this run is llama3 debugmodel with model.dim = 128"
    ):
        check(ConfigManager().parse_args([flags[0], "--model.dim=128"]), 1, "cpu")
    with pytest.raises(ConfigError, match=r"only dense models"):
        sizes_of(Model(name="qwen3_moe", flavor="debugmodel", dim=128))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sizes 0.3M,1M,x --predict 10M", "--sizes: 'x' is not a number above 0"),
        ("--sizes 0.3M,1M,0 --predict 10M", "--sizes: '0' is not a number above 0"),
        ("--sizes 0.3M,1M,3M --tokens 1M,-2 --predict 10M", "--tokens: '-2' is not a number above 0"),
        ("--sizes 0.3M,1M,3M --predict 3M", "--predict 3M is not above the largest of --sizes"),
        ("--sizes 1M,1.01M,2M,3M --predict 10M", "1M and 1.01M both become"),
        ("--sizes 0.3M,1M,2M,3M --predict 3.01M", "3M and 3.01M both become"),
        ("--sizes 0.3M,1M,3M --predict 10M", "3 constants need 3 sizes and 4 runs"),
        ("--sizes 0.3M,1M --tokens 1M,2M,3M,4M --predict 10M", "5 constants need 3 sizes, 3 numbers of tokens"),
        ("--sizes 1M,2M,3M,5M --predict 10M --model.name=qwen3_moe", "needs a dense model"),
        ("--sizes 1M,2M,3M --predict 10M --training.global_batch_size=8@0,16@9", "write a [[stage]] for each size"),
        ("--sizes 1M,2M,3M,5M --predict 10M --training.steps=0", "training.steps must be"),
    ],
)
def test_ladders_that_cannot_be(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ladder", str(FILE), *flags.split(), "--folder", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as exit:
        run_command(main)
    output = capsys.readouterr()
    assert exit.value.code == 2
    assert message in output.err and len(output.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_plan_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--sizes 0.3M,0.6M,1.2M,3M --predict 10M --tokens-per-parameter 5,20 --dry-run --folder"
    monkeypatch.setattr(sys, "argv", ["ladder", str(FILE), *flags.split(), str(tmp_path / "new")])
    main()
    output = capsys.readouterr().out
    assert "8 runs left" in output and "min, at an MFU of 20%" in output
    assert [line.split()[:5] for line in output.splitlines()[1:3]] == [
        ["0.3M-1.63M", "327K", "2", "112", "1.63M"],
        ["0.6M-3.2M", "640K", "3", "128", "3.2M"],
    ]
    assert not (tmp_path / "new").exists()


STAGES = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 64
local_batch_size = 4
steps = 40
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 10
decay_ratio = 0.0
[[stage]]
name = "stable"
until = 0.5
[[stage]]
name = "long"
until = 0.75
training.seq_len = 256
training.local_batch_size = 1
[[stage]]
name = "anneal"
optimizer.lr = 1e-3
lr_scheduler.warmup_steps = 4
lr_scheduler.decay_ratio = 1.0
evaluation.tasks = ["stdlib_brackets"]
validation.freq = 5
"""


def rungs_of(folder: Path, text: str, *flags: str) -> list[JobConfig]:
    (folder / "stages.toml").write_text(text)
    parser = argparse.Namespace(
        sizes="13K,30K,53K,107K", tokens="40960", tokens_per_parameter="20", predict="166K", folder=folder / "ladder"
    )
    file = f"--job.config_file={folder / 'stages.toml'}"
    ladder = choose_runs(parser, ConfigManager().parse_args([file, *flags]))
    assert {rung.tokens for rung in ladder.by_cost} == {40960}
    return [rung.config for rung in ladder.by_cost]


def test_each_run_has_the_stages_of_the_file(tmp_path: Path) -> None:
    """In the same proportions, with what a ladder adapts, and as many tokens as asked for."""
    config, *_ = rungs_of(tmp_path, STAGES)
    total = 40960 // (64 * 4 * 3 // 4 + 256 // 4)  # 3 quarters of the steps have 4 x 64 tokens, the others 1 x 256
    assert config.training.steps == total == 160
    anneal = parse_stages(config)[-1].config
    assert [(stage.first_step, stage.last_step) for stage in parse_stages(config)] == [(1, 80), (81, 120), (121, 160)]
    narrower = config.optimizer.lr / 3e-3
    assert anneal.optimizer.lr == pytest.approx(1e-3 * narrower) and narrower > 1
    assert (config.lr_scheduler.warmup_steps, anneal.lr_scheduler.warmup_steps) == (40, 16)
    assert (anneal.evaluation.tasks, anneal.evaluation.freq, anneal.validation.freq) == (["held_out"], 160, 160)
    assert [stage.config.training.global_batch_size for stage in parse_stages(config, dp=2)] == [4, 1, 4]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("20", "stage stable: until = 20 is the same in all runs of a ladder; make it a fraction .* such as 0.5"),
        ('"5.12K"', "stage stable: until = 5.12K .* such as 0.5"),
        ("0.001", "stage stable: it ends at step 0 of"),
    ],
)
def test_ends_of_stages_that_are_no_fractions(end: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        rungs_of(tmp_path, STAGES.replace("0.5", end))


def test_sizes_share_no_folder(tmp_path: Path) -> None:
    flags = [f"--job.config_file={FILE}", f"--checkpoint.folder={tmp_path / 'checkpoints'}", "--checkpoint.load_step=3"]
    flags.append("--training.global_batch_size=8")
    config = ConfigManager().parse_args(flags)
    shape = shape_of(config.model, find_model_args(config.model), 128)
    saving = make_rung(config, "3M", shape, 1e6, tmp_path / "ladder").config.checkpoint
    assert not Path(saving.folder).is_absolute() and saving.load_step == -1


def test_metrics_that_cannot_be_read_are_no_run_to_begin_again(tmp_path: Path) -> None:
    config = ConfigManager().parse_args([f"--job.config_file={FILE}", "--training.global_batch_size=8"])
    shape = shape_of(config.model, find_model_args(config.model), 128)
    rung = make_rung(config, "3M", shape, 1e6, tmp_path / "ladder")
    assert rung.last_step() == 0
    (rung.folder / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(OSError):
        rung.last_step()


def test_numbers_with_units() -> None:
    assert [short(parse_number(text, "")) for text in ("300k", "1.5B", "20", ".3M", "999999")] == [
        *("300K", "1.5B", "20", "300K", "1M"),
    ]
