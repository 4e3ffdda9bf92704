"""Gradients that ranks sum in bfloat16 (`training.mixed_precision_reduce`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import degrees
from runs import TINY, into, losses, train
from test_check_layout import EAGER, MOE, output_of_check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from workers import in_processes

from torchtitan.parallel.fsdp import apply_fsdp, set_last_microbatch

WIDTH, RANKS = 32, 4
MESHES = {
    "FSDP": (("fsdp",), (4,)),
    "HSDP": (("dp_replicate", "fsdp"), (2, 2)),
    "DDP": (("dp_replicate", "fsdp"), (4, 1)),
}
BFLOAT16 = "--training.mixed_precision_reduce=bfloat16"


class Reductions(TorchDispatchMode):
    """The bytes of gradients in each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in ("_reduce_scatter_base_", "allreduce_"):
            tensor = args[1] if func._opname == "_reduce_scatter_base_" else args[0][0]
            self.bytes[func._opname] = self.bytes.get(func._opname, 0) + tensor.nbytes
        return func(*args, **(kwargs or {}))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


def gradients(
    dtype: torch.dtype, layout: str, batches: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Of these micro-batches, in full, and what the collectives carried."""
    model = layers()
    names, sizes = MESHES[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    apply_fsdp(model, list(model), mesh, torch.bfloat16, dtype, reshard_after_forward=True)
    with Reductions() as reductions:
        for number, batch in enumerate(batches):
            set_last_microbatch([model], number == len(batches) - 1)
            model(batch).float().square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad.to_local().dtype == torch.float32 for grad in grads)
    return [grad.full_tensor() for grad in grads], reductions.bytes


def reduce(layout: str) -> dict[str, Any]:
    """On one rank: gradients of two micro-batches, and of both together where no replicas sum them."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randn(2, 8, WIDTH, generator=generator).bfloat16().unbind()
    exact = []
    for batch in batches:
        model = layers().bfloat16()
        model(batch).float().square().sum().backward()
        own = torch.stack([parameter.grad.double() for parameter in model.parameters()])
        every = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(every, own)
        exact.append(torch.stack(every))
    apart = [gradients(torch.bfloat16, layout, [batch]) for batch in batches]
    result = {"exact": exact, "apart": apart, "float32": gradients(torch.float32, layout, batches[:1])}
    if layout == "FSDP":
        result["together"] = gradients(torch.bfloat16, layout, batches)[0]
    return result


@pytest.mark.parametrize("layout", MESHES)
def test_ranks_sum_gradients_in_bfloat16_and_micro_batches_in_float32(layout: str) -> None:
    for rank in in_processes(reduce, RANKS, layout):
        for exact, (actual, _) in zip(rank["exact"], rank["apart"], strict=True):
            error = torch.stack(actual).double() - exact.mean(0)
            roundings = RANKS - 1  # each by at most half the spacing of a sum of the four
            assert (error.abs() <= roundings * 2**-8 * exact.abs().mean(0)).all() and error.any()
            assert all(torch.equal(grad, grad.bfloat16().float()) for grad in actual)
        _, carried = rank["apart"][0]
        expected, carried_of_float32 = rank["float32"]
        assert carried and {name: 2 * size for name, size in carried.items()} == carried_of_float32
        assert torch.allclose(torch.stack(expected).double(), rank["exact"][0].mean(0), rtol=1e-5, atol=1e-5)
        if layout == "FSDP":
            sums = [first + second for first, second in zip(*(grads for grads, _ in rank["apart"]), strict=True)]
            assert all(torch.equal(grad, total) for grad, total in zip(rank["together"], sums, strict=True))
            assert not all(torch.equal(total, total.bfloat16().float()) for total in sums)


TRAINED = {
    "FSDP 2": (2, 2, ()),
    "HSDP 2 x 2": (4, 1, degrees(replicate=2)),
    "updates in the backward pass": (2, 1, ("--optimizer.early_step_in_backward", "--training.skip_nonfinite=false")),
    # Half of the sum of two numbers is the same in bfloat16, whether rounded before or after.
    "weights in bfloat16": (4, 1, ("--training.weight_dtype=bfloat16", "--optimizer.name=AdamW8bit")),
    "int8": (2, 2, ("--model.converters=int8", "--int8.enable_fsdp_int8_all_gather")),
    "compiled": (2, 1, ("--training.compile",)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.full] * (name != "FSDP 2")) for name in TRAINED]
)
def test_losses_follow_those_of_sums_in_float32(case: str, tmp_path: Path) -> None:
    processes, microbatches, flags = TRAINED[case]
    batch = ("--training.local_batch_size=1", f"--training.global_batch_size={microbatches * processes}")
    base = (*TINY, "--training.mixed_precision_param=bfloat16", *batch, "--training.steps=20", *flags)
    train(*base, into(tmp_path / "float32"), processes=processes)
    train(*base, BFLOAT16, into(tmp_path / "bfloat16"), processes=processes)
    expected, actual = (list(losses(tmp_path / name).values()) for name in ("float32", "bfloat16"))
    assert actual[0] == expected[0] and actual != expected
    assert actual == pytest.approx(expected, rel=5e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (4, degrees(tp=2)),
        (4, degrees(cp=2)),
        (4, (*MOE, *degrees(ep=2))),
        (4, (*MOE, *degrees(ep=2, tp=2))),
        (2, ("--optimizer.name=Muon",)),
        (2, ("--training.mixed_precision_param=float32",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_layouts_are_right_with_it(processes: int, flags: Any) -> None:
    table = output_of_check(0, EAGER, BFLOAT16, *flags, processes=processes)
    assert "equal to one process" in table
