"""The work of a step, counted in the code for a GPU, against what a plan counts in the operations of the same step."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated import needs_triton

from torchtitan.checks.config_checks import check, global_batch_size
from torchtitan.config import ConfigManager
from torchtitan.plan import lowered_step, planner
from torchtitan.plan.devices import named_device
from torchtitan.plan.planner import make_plan
from torchtitan.plan.render import to_text
from torchtitan.plan.result import Plan

FLAGS = [
    "--training.compile", "--training.mixed_precision_param=bfloat16", "--training.seq_len=256",
    "--training.local_batch_size=2", "--training.global_batch_size=6", "--activation_checkpoint.mode=none",
]  # fmt: skip


EXPERTS = [
    "--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2", "--parallelism.tensor_parallel_degree=2",
    "--training.global_batch_size=4", "--job.plan", "--job.simulate_expert_load=1.5",
]  # fmt: skip


INT8 = ["--model.converters=int8", "--int8.enable_fsdp_int8_all_gather"]  # rounds weights in a graph for several sizes


EVERY_SECOND = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]


def plan(folder: Path, *flags: str, world_size: int = 1) -> Plan:
    config = ConfigManager().parse_args([*FLAGS, *flags, f"--job.dump_folder={folder}"])
    dims = check(config, world_size, "cuda")
    return make_plan(config, dims, global_batch_size(config, dims), named_device("H200"))


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    "flags, world_size",
    [([], 1), (EVERY_SECOND, 1), (INT8, 1), (EXPERTS, 4)],
    ids=["one GPU", "every second layer again", "int8 once a step", "FSDP 2 x TP 2, experts over 2"],
)
def test_the_expected_work_is_the_plans(
    flags: list[str], world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def lowered_work(*arguments: Any) -> Any:
        found.append(original(*arguments))
        return found[0]

    original = lowered_step.lowered_work
    monkeypatch.setattr(planner, "lowered_work", lowered_work)
    monkeypatch.setattr(planner, "modes", lambda config: [config.activation_checkpoint.mode])
    planned = plan(tmp_path, *flags, world_size=world_size)
    assert planned.expected is not None, planned.notes[-1]
    gemms = sum(found[0].gemms.values())  # those of routers are in float32
    counted = planned.ranks[0].flops + planned.ranks[0].flops_8bit
    assert gemms + sum(found[0].attention) == pytest.approx(counted, rel=1e-3)
    weights = planned.parameters / world_size
    assert 28 * weights < found[0].update_bytes < 50 * weights  # AdamW alone reads four numbers and writes three
    assert 0 < planned.expected.mfu[1] < planned.expected.mfu[0] < 1
    fast, slow = planned.expected.range
    assert fast < planned.expected.seconds < slow < 1.5 * fast
    text = to_text(planned)
    assert "Expected: " in text and "fused kernels" in text and "optimizer" in text


def test_without_triton_the_plan_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered_step, "find_spec", lambda name: None)
    planned = plan(tmp_path)
    assert planned.expected is None and planned.step_seconds
    assert planned.notes[-1] == "not expected, only bounded: triton is not installed"


@needs_triton
def test_a_plan_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered_step, "TIME_LIMIT", 0.1)
    with pytest.raises(lowered_step.LoweringError, match=r"took longer than 0\.1 s and was ended"):
        lowered_step.lowered_work(ConfigManager().parse_args(FLAGS), 1, "sm_90")


@needs_triton
def test_the_simulated_gpu_keeps_its_cpp_library_to_itself(tmp_path: Path) -> None:
    """Where that is linked statically, torch's libraries would find half of theirs there, and crash when imported."""
    program = "from torchtitan.plan.lowering import SIMULATED, start\nstart(SIMULATED['sm_90'])"
    environment = {**os.environ, "CXX": "g++ -static-libstdc++", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    (library,) = tmp_path.rglob("simulated_gpu*.so")
    visible = subprocess.run(
        ["nm", "-DC", "--defined-only", str(library)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert "std::locale" not in visible.stdout
