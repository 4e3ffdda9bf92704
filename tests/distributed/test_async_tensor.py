"""The compiler's fusion of collectives into GEMMs, in the graph of a tensor-parallel block."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from workers import in_processes

from torchtitan.checks.config_checks import check
from torchtitan.compat.dispatch import FakeTensor
from torchtitan.config import ConfigManager
from torchtitan.config.low_precision import Float8
from torchtitan.converters import Target, apply_converters
from torchtitan.engine.async_gemms import exposed_collectives
from torchtitan.engine.conversion import build_converted_model
from torchtitan.engine.model_args import find_model_args
from torchtitan.kernels.simulated_device import simulated_device
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.parallelize import SHARDING
from torchtitan.parallel.async_tensor import ExposeGemms, FusedGemms
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.rounded_collectives import collectives_for
from torchtitan.parallel.tensor import apply_tensor_parallel
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.planner import make_plan

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
        block(x, model.rope(0, 32, x.device), None).sum().backward()
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


def over_gloo() -> None:
    """Lets torch's operators for GPUs run on CPU: their own code, with symmetric memory replaced by collectives."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in (
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    ):
        library.impl(name, getattr(symmetric_memory, f"_{name}"), "CPU")
    LIBRARIES.append(library)

    def gather(shards: Any, consumer: Any, outs: Any, group: str, needed: bool = True) -> None:
        for shard, out in zip(shards, outs, strict=True):
            received = torch.empty(out.shape, dtype=shard.dtype).view(torch.uint8)
            dist.all_gather_into_tensor(received, shard.contiguous().view(torch.uint8))
            out.copy_(received.view(shard.dtype))
        parts = [out.chunk(dist.get_world_size()) for out in outs]
        for rank in range(dist.get_world_size()):
            consumer([part[rank] for part in parts], rank)

    def gather_one(shard: Any, consumer: Any, out: Any, group: str, needed: bool = True) -> None:
        gather([shard], lambda parts, rank: consumer(parts[0], rank), [out], group, needed)

    def exchange(producer: Any, output: Any, group: str, out_chunk_dim: int = 0) -> None:
        for rank, chunk in enumerate(output.chunk(dist.get_world_size())):
            producer(rank, chunk)
        received = torch.empty_like(output)
        dist.all_to_all_single(received, output)
        output.copy_(received)

    def gather_last(shard: Any, consumer: Any, out: Any, group: str, needed: bool = True) -> None:
        with mock.patch.object(torch.cuda, "Event"):
            gather_one(shard, consumer, out, group)

    for name, function in (
        ("_pipelined_multi_all_gather_and_consume", gather),
        ("_pipelined_all_gather_and_consume", gather_one),
        ("_pipelined_all_gather_and_consume_last_dim", gather_last),
        ("_pipelined_produce_and_all2all", exchange),
    ):
        setattr(symmetric_memory, name, function)
    torch.cuda.Event = mock.MagicMock()  # type: ignore[misc]


LIBRARIES: list[torch.library.Library] = []  # which unregister their kernels when they are deleted


def interpreted(fused: FusedGemms, module: Any, inputs: Any, **_: Any) -> Any:
    """The compiler's graph after the passes that fuse, run operation by operation: C++ code would take minutes."""
    view_to_reshape(module)
    ExposeGemms()(module.graph)
    micro_pipeline_tp_pass(module.graph)
    fused(module.graph)
    module.recompile()
    return make_boxed_func(module.forward)


def scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> Any:
    """torch's GEMM, which on CPU looks at the strides of scales that have one row or column."""
    return SCALED_MM(a, b, *(scale.reshape(-1).reshape(scale.shape) for scale in scales), **options)


SCALED_MM: Any = torch._scaled_mm


def fused_block(recipe: str, fuses: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """A compiled block on two ranks, with the GEMMs of a GPU: what was fused, its output, and its gradients."""
    over_gloo()
    torch.manual_seed(0)
    # GEMMs of scaled operands by torch's operator, which it fuses, instead of ours for CPUs.
    as_on_gpu = simulated_device("cuda", FakeTensor, {})
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
    dist.is_nccl_available = lambda: True
    model: Any = Llama(ARGS).bfloat16()
    if recipe:
        section = Float8(recipe_name=recipe)  # type: ignore[arg-type]
        apply_converters(model, ["float8"], lambda _: section, Target("cpu", tokens=64))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    collectives = functools.partial(collectives_for, overlaps=True)
    apply_tensor_parallel(model, SHARDING, mesh, collectives, flatten=True)
    block, fused = model.layers["0"], FusedGemms()
    if fuses:
        backend = functools.partial(compile_fx, inner_compile=functools.partial(interpreted, fused))
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
    x = torch.randn(1, 32, ARGS.dim, dtype=torch.bfloat16).chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    with as_on_gpu, mock.patch.object(symmetric_memory, "is_symm_mem_enabled_for_group", lambda name: True):
        out = block(x, model.rope(0, 32, x.device), None)
        out.float().square().sum().backward()
    gradients = {name: parameter.grad.to_local() for name, parameter in block.named_parameters()}
    return fused.count, {"out": out.detach(), "x": x.grad, **gradients}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["", "rowwise_with_gw_hp"])
def test_fused_operators_compute_what_gemms_and_collectives_do(recipe: str) -> None:
    """To the bit, with scales of rows, too; torch's own code runs, over gloo."""
    fused = in_processes(fused_block, 2, recipe, True)
    separate = in_processes(fused_block, 2, recipe, False)
    for (count, values), (none, reference) in zip(fused, separate, strict=True):
        assert count >= 6 and none == 0
        for name, value in values.items():
            torch.testing.assert_close(value, reference[name], rtol=0, atol=0, msg=name)
