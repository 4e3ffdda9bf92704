"""The compiler's fusion of collectives into GEMMs, in the graph of a tensor-parallel block."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.errors import ConfigError
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.parallelize import SHARDING
from torchtitan.parallel.async_tensor import FusedGemms
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.tensor import apply_tensor_parallel

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
    fused.check()
    # The all_gathers before attention and before the feed-forward, and the reduce_scatters after them.
    assert fused.count >= 4


@pytest.mark.parametrize("fused, separate", [(0, 0), (0, 8), (2, 6)])
def test_a_run_in_which_few_collectives_were_fused_stops(fused: int, separate: int) -> None:
    gemms = FusedGemms()
    gemms.count, gemms.separate = fused, separate
    with pytest.raises(ConfigError, match=f"fused {fused} of {fused + separate} collectives"):
        gemms.check()
