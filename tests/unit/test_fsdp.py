"""FSDP of a single shard: what one process runs."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.parallel import fsdp

WIDTH = 48


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Copies(TorchDispatchMode):
    """Counts copies between float32 tensors of more than a few numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype == torch.float32:
            self.count += args[0].numel() >= WIDTH**2 and args[0] is not args[1]  # or it would do nothing
        return func(*args, **(kwargs or {}))


def gradients(own_reduction: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], int]:
    """Of two micro-batches, summed, and the copies that they took."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    with monkeypatch.context() as patch:
        if not own_reduction:
            patch.setattr(fsdp, "reduce_scatter_of_one_rank_copies", lambda: False)
        fsdp.apply_fsdp(model, list(model), mesh, torch.bfloat16, torch.float32, reshard_after_forward=False)
    with Copies() as copies:
        for batch in torch.randn(2, 8, WIDTH, dtype=torch.bfloat16):
            model(batch).float().square().sum().backward()
    return [parameter.grad.to_local() for parameter in model.parameters()], copies.count  # type: ignore[union-attr]


def test_gradients_of_a_single_shard_are_not_copied(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found, copies = gradients(True, monkeypatch)
    expected, copies_of_torch = gradients(False, monkeypatch)
    assert copies == 0 and copies_of_torch == 2 * 3  # a copy a layer and micro-batch
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(one.abs().sum() > 0 for one in found)
