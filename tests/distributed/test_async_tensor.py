"""The compiler's fusion of collectives into GEMMs, in the graph of a tensor-parallel block."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.converters import Target
from torchtitan.engine.conversion import build_converted_model, exposed_collectives
from torchtitan.engine.model_args import find_model_args
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.parallelize import SHARDING
from torchtitan.parallel.async_tensor import FusedGemms
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.tensor import apply_tensor_parallel
from torchtitan.plan.devices import named_device
from torchtitan.plan.planner import make_plan

ARGS = LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Two ranks, one of which is real: the compiled code does not run."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)  # required by the compiler pass
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.full
def test_collectives_of_a_block_are_fused_into_its_products(mesh: DeviceMesh) -> None:
    model: Any = Llama(ARGS)
    apply_tensor_parallel(model, SHARDING, mesh)
    block = model.layers["0"]
    apply_compile([block], "cpu")
    fused = FusedGemms()
    settings = torch._inductor.config.patch(_micro_pipeline_tp=True, post_grad_custom_post_pass=fused)
    x = torch.randn(2, 16, ARGS.dim, requires_grad=True)
    # The forward graph is compiled. Running its fused operations would need a GPU.
    with settings, _test_mode(), pytest.raises(NotImplementedError):
        block(x, model.rope(32, x.device), None).sum().backward()
    fused.report()
    # The all_gathers before attention and before the feed-forward, and the reduce_scatters after them.
    assert fused.count >= 4


@pytest.mark.parametrize("fused, separate", [(0, 0), (0, 8), (2, 6), (6, 2)])
def test_a_run_goes_on_and_says_how_many_collectives_were_fused(
    fused: int, separate: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Few fused collectives are a reason to look, not to stop: the run is correct, and may still be the fastest."""
    gemms = FusedGemms()
    gemms.count, gemms.separate = fused, separate
    with caplog.at_level("INFO", "torchtitan"):
        gemms.report()
    (record,) = caplog.records
    assert f"{fused} of {fused + separate} collectives are fused" in record.message
    assert record.levelname == ("INFO" if fused > separate else "WARNING")


@pytest.mark.parametrize(
    "converter, recipe, exposed",
    [
        ("float8", "tensorwise", False),
        ("float8", "rowwise", False),
        ("float8", "rowwise_with_gw_hp", False),
        ("float8", "delayed", True),
        ("float8", "blockwise", True),
        ("int8", "rowwise", True),
    ],
)
def test_gemms_that_cannot_overlap_are_named_before_the_start(converter: str, recipe: str, exposed: bool) -> None:
    config = ConfigManager().parse_args(
        [
            "--model.name=llama3",
            "--model.flavor=debugmodel",
            f"--model.converters={converter}",
            f"--{converter}.recipe_name={recipe}",
            "--parallelism.enable_async_tensor_parallel",
            "--parallelism.tensor_parallel_degree=4",
        ]
    )
    target = Target("meta", compute_capability=(9, 0))
    _, converters = build_converted_model(config, find_model_args(config.model), target)
    remark = exposed_collectives(config, converters)
    assert bool(remark) == exposed and (f"{converter} {recipe} with" in remark) == exposed
    alone = config.changed(parallelism={"tensor_parallel_degree": 1})
    assert exposed_collectives(alone, converters) == ""


@pytest.mark.full
def test_a_plan_names_them_too(tmp_path: Path) -> None:
    flags = ["--model.flavor=debugmodel", "--model.converters=int8", "--training.compile", "--job.plan"]
    flags.append("--training.mixed_precision_param=bfloat16")
    parallelism = ["--parallelism.tensor_parallel_degree=2", "--parallelism.enable_async_tensor_parallel"]
    config = ConfigManager().parse_args([*flags, *parallelism, f"--job.dump_folder={tmp_path}"])
    plan = make_plan(config, check(config, 2, "cuda"), named_device("H100"))
    assert any("cannot overlap the GEMMs of int8 rowwise" in note for note in plan.notes)
