"""The communication of tensor parallelism."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from workers import in_processes

from torchtitan.config.low_precision import Float8, Int8
from torchtitan.converters import Target, apply_converters
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.norm import RMSNorm
from torchtitan.models.parallelize import SHARDING
from torchtitan.parallel.rounded_collectives import collectives_for
from torchtitan.parallel.tensor import apply_tensor_parallel

ARGS = LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64)


class Gathers(TorchDispatchMode):
    """What is gathered: dtypes of tensors, and scales of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in str(func):
            self.bytes += args[0].nbytes
            scales = args[0].dtype == torch.float32 and args[0].shape[-1] == 1
            self.seen.append("scales" if scales else str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def block_with_its_gathers(
    converter: str, recipe: Any, filtered: str, in_8_bits: bool, overlaps: bool, batch: int
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """A block of low-precision layers on two ranks: what it gathers, its output, and its gradients."""
    torch.manual_seed(0)
    model: Any = Llama(ARGS).bfloat16()
    section = {"float8": Float8, "int8": Int8}[converter](recipe_name=recipe, filter_fqns=[filtered])
    apply_converters(model, [converter], lambda _: section, Target("cpu", tokens=64))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options: dict[str, Any] = {}
    if in_8_bits:
        options["collectives_for"] = functools.partial(collectives_for, overlaps=overlaps)
    apply_tensor_parallel(model, SHARDING, mesh, flatten=True, **options)
    x = torch.randn(batch, 32, 64, dtype=torch.bfloat16).chunk(2, 1)[mesh.get_local_rank()].clone().requires_grad_()
    with Gathers() as gathers:
        out = model.layers["0"](x, model.rope(0, 32, x.device), None)
        out.float().square().sum().backward()
    assert x.grad is not None
    gradients = {name: parameter.grad.to_local() for name, parameter in model.layers["0"].named_parameters()}
    return gathers.seen, {"bytes": torch.tensor(gathers.bytes), "out": out.detach(), "x": x.grad, **gradients}


def blocks_look_alike() -> bool:
    """Whether the sharded modules of two blocks have the same classes, and gather with the same function."""
    with torch.device("meta"):
        model: Any = Llama(dataclasses.replace(ARGS, n_layers=2))
    apply_converters(model, ["float8"], lambda _: Float8(), Target("cpu", tokens=64))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, SHARDING, mesh, functools.partial(collectives_for, overlaps=False))
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


BF16, ONE_SCALE, ONE_SCALE_INT8, BY_ROW = ["bfloat16"], ["uint8"], ["int8"], ["scales", "uint8"]


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "filtered", "overlaps", "expected"),
    [
        # Before attention and before the feed-forward; then the gradients after them, last first.
        ("float8 tensorwise", "output", False, [*ONE_SCALE * 4]),
        ("float8 tensorwise", "attention.wk", False, [*BF16, *ONE_SCALE * 3]),  # wk needs its input in bfloat16
        ("float8 rowwise", "output", False, [*BY_ROW * 4]),
        ("float8 rowwise", "w2", False, [*BY_ROW * 2, *BF16, *BY_ROW]),
        ("float8 rowwise_with_gw_hp", "output", True, [*BY_ROW * 3, *BF16 * 3, *BY_ROW, *BF16 * 4]),
        ("int8 tensorwise", "output", False, [*ONE_SCALE_INT8 * 4]),
        ("int8 rowwise", "output", False, [*BF16 * 4]),  # columns of int8 would be rounded twice
        ("float8 rowwise_with_gw_hp", "output", False, [*BF16 * 4]),  # which weight gradients need anyway
    ],
)
def test_tokens_are_gathered_in_8_bits_where_all_who_take_them_can(
    recipe: str, filtered: str, overlaps: bool, expected: list[str], batch: int
) -> None:
    converter, name = recipe.split()
    results = in_processes(block_with_its_gathers, 2, converter, name, filtered, True, overlaps, batch)
    references = in_processes(block_with_its_gathers, 2, converter, name, filtered, False, overlaps, batch)
    for (gathers, values), (_, reference) in zip(results, references, strict=True):
        assert gathers == expected
        if expected == [*BY_ROW * 4]:
            rows = 4 * batch * 16  # of one rank; 64 channels of bfloat16, or of float8 and a scale
            assert (values.pop("bytes"), reference["bytes"]) == (rows * (64 + 4), rows * 64 * 2)
        values.pop("bytes", None)
        for tensor, value in values.items():
            if tensor.startswith(("attention.", "feed_forward.")) and recipe == "float8 rowwise":
                # Columns are rounded after rows, by powers of two: only the smallest numbers differ.
                error = (value.float() - reference[tensor].float()).norm() / reference[tensor].float().norm()
                assert error < 2e-3, tensor
            else:  # casting order does not matter
                torch.testing.assert_close(value, reference[tensor], rtol=0, atol=0, msg=tensor)
