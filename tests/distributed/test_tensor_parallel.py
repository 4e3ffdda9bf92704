"""The communication of tensor parallelism."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from workers import in_processes

from torchtitan.config.low_precision import Float8
from torchtitan.converters import Target, apply_converters
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.norm import RMSNorm
from torchtitan.models.parallelize import SHARDING
from torchtitan.parallel.float8_tensor_parallel import all_gather_for
from torchtitan.parallel.tensor import apply_tensor_parallel

ARGS = LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64)


class Gathers(TorchDispatchMode):
    """The dtypes of all gathered tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def block_with_its_gathers(recipe: Any, filtered: str, in_float8: bool) -> tuple[list[str], torch.Tensor]:
    """A block of float8 layers on two ranks: the dtypes that its forward pass gathers, and its output."""
    torch.manual_seed(0)
    model: Any = Llama(ARGS).bfloat16()
    section = Float8(recipe_name=recipe, filter_fqns=[filtered])
    apply_converters(model, ["float8"], lambda _: section, Target("cpu", tokens=64))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options: dict[str, Any] = {"all_gather_for": all_gather_for} if in_float8 else {}
    apply_tensor_parallel(model, SHARDING, mesh, **options)
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16).chunk(2, 1)[mesh.get_local_rank()].clone().requires_grad_()
    with Gathers() as gathers:
        out = model.layers["0"](x, model.rope(32, x.device), None)
    out.float().square().sum().backward()
    assert x.grad is not None
    return [str(dtype) for dtype in gathers.dtypes], torch.stack([out.detach(), x.grad])


def blocks_look_alike() -> bool:
    """Whether the sharded modules of two blocks have the same classes, and gather with the same function."""
    with torch.device("meta"):
        model: Any = Llama(dataclasses.replace(ARGS, n_layers=2))
    apply_converters(model, ["float8"], lambda _: Float8(), Target("cpu", tokens=64))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, SHARDING, mesh, all_gather_for)
    looks = [
        [
            (type(module), [vars(hook).get("gather") for hook in module._forward_pre_hooks.values()])
            for module in block.modules()
        ]
        for block in model.layers.values()
    ]
    return looks[0] == looks[1]


def test_blocks_look_alike_to_the_compiler() -> None:
    """Otherwise it would compile each block separately, and stop at the ninth."""
    assert in_processes(blocks_look_alike, 2) == [True, True]


def gradient_of_a_norm() -> list[float]:
    """Its partial sums on four ranks are 256, 1, 1 and 1."""
    model = nn.ModuleDict({"norm": RMSNorm(4, eps=0.0)}).bfloat16()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, {"norm": "sequence"}, mesh)
    out = model["norm"](torch.ones(1, 1, 4, dtype=torch.bfloat16))
    out.backward(torch.full_like(out, 256.0 if mesh.get_local_rank() == 0 else 1.0))
    grad: Any = next(model.parameters()).grad
    return grad.full_tensor().tolist()


def test_gradients_of_norms_are_summed_in_float32() -> None:
    """259, rounded once; bfloat16 has no number between 256 and 258."""
    assert in_processes(gradient_of_a_norm, 4) == [[260.0] * 4] * 4


@pytest.mark.parametrize(
    ("recipe", "filtered", "expected"),
    [
        ("tensorwise", "output", ["torch.uint8", "torch.uint8"]),
        ("tensorwise", "attention.wk", ["torch.bfloat16", "torch.uint8"]),  # wk needs its input in bfloat16
        ("rowwise", "output", ["torch.bfloat16", "torch.bfloat16"]),
    ],
)
def test_activations_are_gathered_in_float8_where_all_who_take_them_can(
    recipe: Any, filtered: str, expected: list[str]
) -> None:
    results = in_processes(block_with_its_gathers, 2, recipe, filtered, True)
    references = in_processes(block_with_its_gathers, 2, recipe, filtered, False)
    for (dtypes, values), (_, reference) in zip(results, references, strict=True):
        assert dtypes == expected
        torch.testing.assert_close(values, reference, rtol=0, atol=0)  # casting order does not matter
