"""The last layer of a SwiGLU, which rounds the gradients of gate and up for the layers before it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import Target, apply_converters
from torchtitan.converters import linear as linear_layers
from torchtitan.kernels.dispatch import KERNELS
from torchtitan.kernels.quantize import Quantized, quantize_both, quantize_columns
from torchtitan.kernels.simulated_device import simulated_device
from torchtitan.kernels.swiglu import swiglu
from torchtitan.models.transformer import FeedForward

TOKENS, DIM, INNER = 64, 32, 96
PLANNED = Target("meta", tokens=TOKENS)
KEYS: dict[str, dict[str, Any]] = {
    "float8 rowwise": {"float8": Float8(recipe_name="rowwise")},
    "int8 rowwise": {"int8": Int8()},
    "one scale": {"float8": Float8()},
    "int8, one scale": {"int8": Int8(recipe_name="tensorwise")},
    "weight gradients in bf16": {"float8": Float8(recipe_name="rowwise_with_gw_hp")},
    "input gradients in bf16": {"int8": Int8(grad_input=False)},
    "blocks": {"mx": MX(emulate=True)},
    "emulated": {"float8": Float8(recipe_name="rowwise", emulate=True)},
    "w1 stays": {"int8": Int8(filter_fqns=["w1"])},
    "w1 in another format": {"int8": Int8(filter_fqns=["w1"]), "float8": Float8(recipe_name="rowwise")},
}


def feed_forward(name: Any = "swiglu") -> FeedForward:
    torch.manual_seed(0)
    layer = FeedForward(DIM, INNER, name)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


def converted(layer: FeedForward, keys: dict[str, Any], target: Target = PLANNED) -> Any:
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": layer})})
    apply_converters(model, list(keys), keys.__getitem__, target)
    return layer


@pytest.mark.parametrize("case", KEYS)
def test_only_where_all_gemms_of_the_three_layers_round_rowwise_alike(case: str) -> None:
    assert converted(feed_forward(), KEYS[case]).w2.takes_gate == case.endswith(" rowwise")


def test_on_a_cpu_no_layer_takes_the_gate() -> None:
    """The hooks of a user see its input."""
    assert not converted(feed_forward(), KEYS["int8 rowwise"], Target("cpu", tokens=TOKENS)).w2.takes_gate


def test_another_activation_is_computed_as_it_is() -> None:
    layer = converted(feed_forward("geglu"), KEYS["int8 rowwise"])
    apart = copy.deepcopy(layer)
    apart.w2.takes_gate = False
    x = torch.randn(2, TOKENS // 2, DIM)
    assert torch.equal(layer(x), apart(x))
    converted(feed_forward("relu_squared"), KEYS["int8 rowwise"])(x)  # it has no w3


@pytest.mark.parametrize("case", ["float8 rowwise", "int8 rowwise"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_result_and_all_gradients_are_those_of_the_layers_apart(
    case: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, if the kernel for GPUs computes what the layers round."""
    calls = []

    def rounded(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> Any:
        calls.append(grad.shape)
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (gate, up)]
            product = swiglu(*inputs)
        both = [quantize_both(x, "rowwise", dtype) for x in torch.autograd.grad(product, inputs, grad)]
        column_major = [(rows, Quantized(columns.data.t().contiguous().t(), columns[1])) for rows, columns in both]
        return *column_major, quantize_columns(product.detach(), "rowwise", dtype)

    if on_gpu:
        monkeypatch.setattr(linear_layers, "rounds_swiglu_gradients", lambda x, dtype: True)
        monkeypatch.setattr(linear_layers, "round_swiglu_gradients", rounded)
    layer = converted(feed_forward(), KEYS[case])
    apart = copy.deepcopy(layer)
    apart.w2.takes_gate = False
    x = torch.randn(2, TOKENS // 2, DIM, requires_grad=True)
    results = []
    for module in (layer, apart):
        out = module(x)
        results.append([out, *torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out).cumsum(1))])
    assert all(map(torch.equal, *results))
    assert calls == [(TOKENS, INNER)] * on_gpu
    with torch.no_grad():
        assert torch.equal(layer(x), results[0][0])
    assert len(calls) == on_gpu


def test_a_plan_for_a_gpu_counts_what_is_kept() -> None:
    """Gate and up, beside the layer's input in 8 bits; apart, silu(gate) and the product in 8 bits, too."""
    kept = []
    for takes_gate in (True, False):
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        layer = converted(feed_forward(), KEYS["int8 rowwise"])
        layer.w2.takes_gate = takes_gate
        rows = {name: kernels[-1:] for name, kernels in KERNELS.items()}
        with FakeTensorMode(allow_non_fake_inputs=True), simulated_device("cuda", FakeTensor, rows):
            x = torch.empty(TOKENS, DIM, requires_grad=True)
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                out = layer(x)
        kept.append(sum(saved.values()))
        assert out.shape == (TOKENS, DIM)
    scales = 4 * INNER
    assert kept[1] - kept[0] == TOKENS * INNER * (4 + 1) + scales
