"""`python -m torchtitan.tools.check_layout`: passes for layouts that are right, and names faults that are not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import degrees
from runs import LAUNCHER, ROOT, output_of_ranks, python, started

from torchtitan.models.deepseek_v3 import DEEPSEEK_V3
from torchtitan.parallel.dims import ParallelDims
from torchtitan.tools.layout_comparison import Measured, _are_copies, _comparisons, _sizes, _sketch

DEBUG = "--job.config_file=train_configs/debug_model.toml"
FLOAT32 = "--training.mixed_precision_param=float32"
MOE = ("--job.config_file=train_configs/debug_moe.toml",)
EAGER = "--training.compile=false"
SHORT = "--training.seq_len=64"


def check(*flags: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """The command, as a user starts it."""
    command = [sys.executable, "-m", "torchtitan.tools.check_layout", SHORT, *flags]
    environment = {**os.environ, "NGPU": str(processes)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def forked_check(*flags: str, processes: int = 2) -> tuple[int, str]:
    """What the command starts, in forked processes. Returns (exit status, all output)."""
    command = (*LAUNCHER, "--max-restarts=0", "-m", "torchtitan.tools.check_layout", SHORT)
    with started(*flags, command=command, processes=processes) as run:
        return run.finish()


def check_as_rank(status: int, *flags: str) -> None:
    from torchtitan.launcher.rank_process import RANK  # only now: it reads the rank
    from torchtitan.tools.check_layout import main

    assert main([SHORT, *flags]) == (status if RANK == 0 else 0)


def output_of_check(status: int, *flags: str, processes: int = 2) -> str:
    """What the command prints, in forked processes; it must end with this status."""
    return output_of_ranks(check_as_rank, status, *flags, processes=processes)


PLANTED = {
    "NotSummed": (degrees(tp=2), "attention.q_norm.weight", "not summed over tp"),
    "SummedTwice": (degrees(tp=2), "attention.q_norm.weight", "summed twice over tp"),
    "UnsummedNorms": (degrees(tp=2), "ffn_norm.weight", "not summed over tp"),
    "DriftingNorms": (degrees(tp=2), "ffn_norm.weight", "ranks hold different copies"),
    "HalvedGradients": ((), "attention.wq.weight", "averaged over dp_shard once too often"),
    "LostMicrobatches": (degrees(pp=2), "attention.wq.weight", "a micro-batch is lost"),
    "WrongPositions": (degrees(cp=2), "attention.wq.weight", "another rank's"),
    "WrongGroup": (degrees(ep=2), "moe.experts.w1.weight", "summed twice over dp_shard or ep"),
    "tiny_qwen3": (
        ("--model.converters=int8", "--int8.recipe_name=tensorwise", "--int8.enable_fsdp_int8_all_gather"),
        "attention.wq.weight",
        "another rank's",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "NotSummed" else [pytest.mark.full]) for model in PLANTED]
)
def test_a_planted_fault_is_named(model: str, tmp_path: Path) -> None:
    layout, parameter, cause = PLANTED[model]
    output = tmp_path / "layout.json"
    module = ("--experimental.custom_import=wrong_gradients", f"--model.name={model}", "--model.flavor=deep")
    flags = (DEBUG, FLOAT32, *module, *layout, f"--output={output}")
    if model == "SummedTwice":
        ended = check(*flags)
        assert ended.returncode == 1, ended.stdout + ended.stderr
        printed = ended.stdout
    else:
        printed = output_of_check(1, *flags)
    rows = json.loads(output.read_text())["comparisons"]
    wrong = [row for row in rows if row["quantity"] == "gradient" and row["cause"]]
    assert any(row["name"].endswith(parameter) and cause in row["cause"] for row in wrong), printed
    assert wrong[0]["name"] in printed
    if model in ("NotSummed", "SummedTwice", "UnsummedNorms", "WrongGroup"):
        assert all(parameter.rpartition(".")[0].rpartition(".")[0] in row["name"] for row in wrong)


LAYOUTS: dict[str, Any] = {
    "TP 2, float8": (2, DEBUG, *degrees(tp=2), "--model.converters=float8"),
    "FSDP 2, accumulation, compile": (2, DEBUG, "--training.global_batch_size=64", "--training.compile"),
    "FSDP 2 x TP 2, Muon": (4, DEBUG, *degrees(tp=2), "--optimizer.name=Muon"),
    "FSDP 2 x PP 2, recomputation, float32": (4, DEBUG, *degrees(pp=2), "--activation_checkpoint.mode=full", FLOAT32),
    "CP 2, int8": (2, DEBUG, *degrees(cp=2), "--model.converters=int8"),
    "HSDP 2 x 2, float8 all-gather": (
        4,
        DEBUG,
        *degrees(replicate=2),
        "--model.converters=float8",
        "--float8.enable_fsdp_float8_all_gather",
    ),
    "mx": (2, DEBUG, "--model.converters=mx", "--mx.emulate"),
    "experts, TP 2, EP 2": (4, *MOE, *degrees(tp=2, ep=2)),
    "experts, FSDP 2, EP 2, float8": (2, *MOE, *degrees(ep=2), "--model.converters=float8"),
    "8B's file": (2, "--job.config_file=train_configs/llama3_8b.toml", EAGER),
    "AdamW8bit, two": (2, DEBUG, "--optimizer.name=AdamW8bit"),
    "TP 2, tied": (2, "--job.config_file=train_configs/qwen3_0.6b.toml", *degrees(tp=2), EAGER),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_layout_passes(layout: str) -> None:
    processes, *flags = LAYOUTS[layout]
    assert "equal to one process" in output_of_check(0, *flags, processes=processes)


@pytest.mark.full
def test_a_layout_that_does_not_fit_is_one_sentence() -> None:
    ended = python("-m", "torchtitan.tools.check_layout", SHORT, DEBUG, *degrees(tp=2), NGPU="1")
    assert ended.returncode == 2
    assert "start a multiple of 2 processes" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.full
def test_a_stopped_check_is_no_answer(tmp_path: Path) -> None:
    """No status 0, and no word of checkpoints."""
    endless = "layout_check._of_one_process = lambda *_, **options: time.sleep(600)\n"
    (tmp_path / "endless.py").write_text(f"import time\nfrom torchtitan.run import layout_check\n{endless}")
    command = [sys.executable, "-m", "torchtitan.tools.check_layout", DEBUG, "--experimental.custom_import=endless"]
    for number in (signal.SIGTERM, signal.SIGINT):
        environment = {**os.environ, "NGPU": "2", "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{tmp_path}"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert any("1 of 3" in line for line in process.stdout)
            process.send_signal(number)
            left = process.stdout.read()
        assert process.returncode == 128 + number, left
        assert f"Stopped by {number.name}." in left and "checkpoint" not in left


@pytest.mark.full
def test_mistakes_are_said_before_anything_is_trained(tmp_path: Path) -> None:
    for flags, sentence in (
        ((f"--output={tmp_path}",), f"--output: {tmp_path} cannot be written"),
        ((f"--output={tmp_path / 'nothing' / 'x.json'}",), "cannot be written"),
    ):
        status, output = forked_check(DEBUG, *flags)
        assert status == 2 and sentence in output and "1 of 3" not in output


@pytest.mark.full
def test_one_process_is_no_layout() -> None:
    status, output = forked_check(DEBUG, FLOAT32, "--model.converters=float8", processes=1)
    assert status == 0 and "set NGPU" in output
    assert "float32, float8" in output


def test_a_norm_may_differ_as_much_as_gradients_do() -> None:
    """Even if it is the same in both runs of one process."""
    ones = torch.ones(4, dtype=torch.float64)
    tensors = {("loss", ""): ones, ("norm", ""): ones, ("gradient", "w"): ones, ("weight", "w"): ones}
    first = Measured(tensors, "bfloat16", False, set())
    again = first._replace(tensors={**tensors, ("gradient", "w"): 1.01 * ones, ("weight", "w"): 1.01 * ones})
    of_layout = again._replace(tensors={**again.tensors, ("norm", ""): 1.01 * ones})
    assert not [row for row in _comparisons([first, again, of_layout], ParallelDims()) if row.cause]


@pytest.mark.parametrize("drift", [1e-5, 1e-7])
def test_copies_that_drift_by_a_few_millionths_are_seen(drift: float) -> None:
    copy = torch.randn(64, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert _are_copies(_sketch(copy), _sketch(copy.clone()))
    assert _are_copies(_sketch(copy * (1 + drift)), _sketch(copy)) == (drift < 1e-6)
    one = copy.clone()
    one[3, 5] += drift * copy.norm() * 10
    assert not _are_copies(_sketch(one), _sketch(copy)) or drift < 1e-6


@pytest.mark.parametrize(("ep", "experts"), [(1, 32), (24, 48), (64, 128)])
def test_smaller_models_have_as_many_groups_of_experts(ep: int, experts: int) -> None:
    """With as many experts of a group as a token needs."""
    smallest: Any = next(_sizes(DEEPSEEK_V3["671B-A37B"], ParallelDims(ep=ep)))
    assert (smallest.moe.n_experts, smallest.moe.n_groups, smallest.moe.top_groups) == (experts, 8, 4)
