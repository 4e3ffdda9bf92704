"""The work of a step, counted in the code for a GPU, against what a plan counts in the operations of the same step."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lowered_step import extrapolate
from simulated import needs_triton, on_gpu
from watch import plus, work_of_graph

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.planner import make_plan
from torchtitan.tools.plan.result import Plan
from torchtitan.tools.plan.step_model import Work

WORK = Work({"bf16": 100.0, "int8": 100.0}, (50.0, 50.0), 10.0, 20.0, 30.0)
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
    return make_plan(config, dims, named_device("H200"))


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    "flags, world_size",
    [(EVERY_SECOND, 1), (INT8, 1), (EXPERTS, 4)],
    ids=["every second layer again", "int8 once a step", "FSDP 2 x TP 2, experts over 2"],
)
def test_the_work_is_the_plans(flags: list[str], world_size: int, tmp_path: Path) -> None:
    lowered = on_gpu("sm_90", "lowered_step.work_of", [*FLAGS, *flags, f"--job.dump_folder={tmp_path}"], world_size)
    planned = plan(tmp_path, *flags, world_size=world_size)
    gemms = sum(lowered.gemms.values())  # routers' GEMMs are in float32
    counted = planned.ranks[0].flops + planned.ranks[0].flops_8bit
    assert gemms + sum(lowered.attention) == pytest.approx(counted, rel=1e-3)
    weights = planned.parameters / world_size
    assert 28 * weights < lowered.update_bytes < 50 * weights  # AdamW alone reads four numbers and writes three


def test_work_of_more_layers_from_one_and_two() -> None:
    layer = Work({"int8": 3.0}, (1.0, 2.0), 4.0, 5.0, 6.0)
    assert extrapolate([plus(WORK, layer), plus(WORK, layer, 2)], 5) == plus(WORK, layer, 5)
    assert extrapolate([WORK], 1) == WORK


def test_collectives_in_compiled_code_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seconds of links; not as bytes of operations as well."""

    def node(operator: str | None) -> SimpleNamespace:
        return SimpleNamespace(
            get_read_write_buffers_sizes=lambda: 7,
            is_foreach=lambda: False,
            node=SimpleNamespace(inputs=[]),
            name=operator,
        )

    names = ["_c10d_functional.all_gather_into_tensor", "torchtitan.exchange_rows", "aten.sort", None]
    sizes = SimpleNamespace(optimization_hint=int)
    graph = SimpleNamespace(scheduler=SimpleNamespace(nodes=list(map(node, names))), sizevars=sizes)
    monkeypatch.setattr("watch.compiler.operator_of", lambda node: node.name)
    work = work_of_graph(graph)
    assert (work.other_bytes, work.fused_bytes) == (7, 7)  # the sort; a generated kernel


@needs_triton
@pytest.mark.full
def test_the_simulated_gpu_keeps_its_cpp_library_to_itself(tmp_path: Path) -> None:
    """Where that is linked statically, torch's libraries would find half of theirs there, and crash when imported."""
    program = "from lowering import SIMULATED, start\nstart(SIMULATED['sm_90'])"
    environment = {**os.environ, "CXX": "g++ -static-libstdc++", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=Path(__file__).parent, check=True)
    (library,) = tmp_path.rglob("simulated_gpu*.so")
    visible = subprocess.run(
        ["nm", "-DC", "--defined-only", str(library)], stdout=subprocess.PIPE, text=True, check=True
    )
    assert "std::locale" not in visible.stdout
