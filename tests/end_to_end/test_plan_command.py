"""`--job.plan` as typed by a user."""

import json
import re
from pathlib import Path

import pytest
from runs import ROOT, failure, into, train, train_here

from torchtitan.errors import ConfigError

PLAN = "--job.plan"
TINY = ("--experimental.custom_import=tiny", "--model.name=tiny", "--model.flavor=narrow", "--training.seq_len=64")


@pytest.mark.full
def test_a_plan_without_training(tmp_path: Path) -> None:
    """With run_train.sh, for the processes that it would start."""
    flags = ("--parallelism.tensor_parallel_degree=2", "--model.converters=float8", "--activation_checkpoint.mode=full")
    command = [str(ROOT / "run_train.sh"), PLAN, *TINY, *flags, into(tmp_path)]
    output = train(command=command, NGPU="16", CONFIG_FILE=str(ROOT / "train_configs" / "debug_model.toml"))
    lines = output[output.index("plan of tiny") :].splitlines()
    assert lines[2].startswith("Expected: ") and "with causal attention" in lines[2]  # before any bound
    for fragment in (
        "The expected step by part",
        "16 x NVIDIA H100",
        "FSDP 8 x TP 2",
        "It fits",
        "linear layers converted (float8",
        "peak with none",
        "Activations and buffers per token of a rank's batch",
    ):
        assert fragment in output
    plan = json.loads((tmp_path / "plan.json").read_text())
    (rank,) = plan["ranks"]
    # 598,336 float32 numbers on 16 ranks; 5 norms of 64 on each of two
    assert rank["parameters"] == (4 * (598_336 - 5 * 64) // 2 + 4 * 5 * 64) // 8
    assert rank["gradients"] == rank["parameters"]
    assert rank["peaks"]["none"] > rank["peaks"]["full"] > rank["parameters"] + rank["gradients"] + rank["optimizer"]
    assert {line["dimension"] for line in rank["traffic"]} == {"fsdp", "tp", "world"}
    assert plan["step_seconds"] > 0
    assert plan["conversion"]
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.full
def test_a_plan_of_experts_on_two_machines(tmp_path: Path) -> None:
    """Each of 16 ranks has one of the 16 experts of two layers."""
    sparse = ("--model.name=sparse", "--model.flavor=many", "--parallelism.expert_parallel_degree=16")
    world = ("--job.simulate_world_size=16", "--activation_checkpoint.mode=none")
    train_here(*TINY, *sparse, *world, "--training.local_batch_size=1", PLAN, into(tmp_path))
    plan = json.loads((tmp_path / "plan.json").read_text())
    (line,) = (line for line in plan["ranks"][0]["traffic"] if line["dimension"] == "ep")
    # Of each layer: 64 tokens for 2 experts, 64 channels, in bfloat16, there and back, and their gradients; the numbers
    # of rows. A rank sends to 7 others of its machine, and 8 of another.
    assert (line["kind"], line["ranks"], line["count"]) == ("all-to-all", 16, 2 * 5)
    assert line["bytes"] == 2 * (4 * 64 * 2 * 64 * 2 + 16 * 8)
    assert (line["within_node"], line["between_nodes"]) == (line["bytes"] * 7 // 16, line["bytes"] * 8 // 16)
    assert plan["parameters"] - plan["active_parameters"] == 2 * 14 * 3 * 64 * 32  # 14 of 16 experts, not for a token


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--job.simulate_world_size=8"], "job.simulate_world_size has no effect without job.plan"),
        (
            [PLAN, "--job.simulate_world_size=6", "--parallelism.tensor_parallel_degree=4"],
            "6 processes are not a multiple",
        ),
        ([PLAN, "--job.simulate_device=H101"], "job.simulate_device: unknown device 'H101' (did you mean H100?)"),
        (
            [PLAN, "--job.simulate_world_size=4", "--job.simulate_expert_load=1.5"],
            "job.simulate_expert_load = 1.5: a rank gets at most parallelism.expert_parallel_degree = 1 times the mean",
        ),
        (["--job.simulate_expert_load=1.5"], "job.simulate_expert_load has no effect without job.plan"),
    ],
    ids=["no plan", "degrees", "device", "load", "load without a plan"],
)
def test_mistakes(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        train_here(*TINY, *flags, into(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("entry", ["auto_filter_numerics", "auto_filter_measured"])
def test_filters_that_measure_work_for_later_stages(entry: str, tmp_path: Path) -> None:
    flags = (*TINY, "--training.mixed_precision_param=bfloat16", "--training.local_batch_size=2")
    stages = ("--job.simulate_world_size=2", "--parallelism.pipeline_parallel_degree=2")
    keys = ("--model.converters=int8", f"--int8.filter_fqns=output,{entry}", "--job.simulate_device=H100")
    train_here(*flags, PLAN, *stages, *keys, into(tmp_path))
    assert (tmp_path / "plan.json").exists()


@pytest.mark.full
def test_several_processes_make_no_plan(tmp_path: Path) -> None:
    """As started by torchrun, or from a file that requests a plan."""
    file = tmp_path / "plan.toml"
    file.write_text("[memory_estimation]\nenabled = true\n")
    status, output = failure(f"--job.config_file={file}", *TINY, into(tmp_path), processes=2)
    assert status == 2
    assert output.count("job.plan needs one process") == 1


@pytest.mark.full
@pytest.mark.parametrize("converter", ["float8", "int8"])
def test_a_plan_of_a_cpu_counts_8_bit_products(
    converter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(*TINY, f"--model.converters={converter}", PLAN, into(tmp_path))
    text = capsys.readouterr().out
    assert "A step takes at least" in text and not any(word in text for word in ("NCCL", "CUDA", "GB/s", "per machine"))
    assert json.loads((tmp_path / "plan.json").read_text())["ranks"][0]["flops_8bit"] > 0


@pytest.mark.full
def test_a_plan_of_stages_names_the_one_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stages.toml"
    file.write_text(
        "[[stage]]\nname = 'small'\nuntil = 5\n[[stage]]\nname = 'large'\ntraining.local_batch_size = 1000000\n"
    )
    flags = ("--training.steps=10", "--job.simulate_device=H100", "--job.simulate_world_size=1", PLAN, into(tmp_path))
    with pytest.raises(ConfigError, match=r"^stage large does not fit into memory\.$"):
        train_here(*TINY, *flags, f"--job.config_file={file}")
    table = "".join(capsys.readouterr()).partition("stages of the run")[2]
    assert [line.split()[1] for line in table.splitlines() if line.startswith("stage ")][-2:] == ["small", "large"]
