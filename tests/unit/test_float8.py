"""float8 GEMMs: whether they run, how accurate they are, and which layers use them."""

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.compat.dispatch import FakeTensorMode
from torchtitan.config.low_precision import Float8
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.converter import weight_unchanged
from torchtitan.converters.linear import LowPrecisionLinear
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.recipes import FLOAT8_SECTION
from torchtitan.errors import ConfigError
from torchtitan.kernels import rounding
from torchtitan.kernels.operator import fused
from torchtitan.kernels.quantize import float8_scale, powers_of_two, scale_by
from torchtitan.models import loss
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama

CPU = Target("cpu")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


class CountedGemms(TorchDispatchMode):
    """Counts GEMMs by operation as they run, after tensor subclasses have handled them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not set(types) <= {torch.Tensor, nn.Parameter}:
            return NotImplemented
        operations = torch.ops.torchtitan.float8_mm, torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._scaled_mm
        if func.overloadpacket in operations:
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def convert(model: nn.Module, **keys: Any) -> nn.Module:
    apply_converters(model, ["float8"], lambda section: Float8(**keys), CPU)
    return model


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is LowPrecisionLinear]


def tiny_llama(n_layers: int = 2) -> Llama:
    with torch.device("meta"):
        return Llama(LlamaArgs(dim=64, n_layers=n_layers, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256))


# Relative errors (output, input gradient, weight gradient) of one linear layer: float8 has a mantissa of 3 bits (E4M3)
# or 2 (E5M2), rowwise scales fit better, and gw_hp keeps the weight gradient in bfloat16.
ERRORS = {
    "tensorwise": (0.037, 0.059, 0.059),
    "rowwise": (0.036, 0.036, 0.038),
    "rowwise_with_gw_hp": (0.036, 0.036, 0.003),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_run_in_float8_with_its_errors(recipe: str) -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(256, 512, bias=False))
    low = convert(copy.deepcopy(exact), recipe_name=recipe).bfloat16()
    x, grad = torch.randn(256, 256), torch.randn(256, 512)

    def run(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = x.to(dtype).requires_grad_()
        out = model(inputs)
        out.backward(grad.to(dtype))
        weight = next(model.parameters())
        assert inputs.grad is not None
        assert weight.grad is not None
        return [tensor.detach().float() for tensor in (out, inputs.grad, weight.grad)]

    with CountedGemms() as gemms:
        ours = run(low, torch.bfloat16)
    in_high_precision = 1 if recipe == "rowwise_with_gw_hp" else 0
    assert gemms.count["float8_mm"] == 3 - in_high_precision
    assert gemms.count["mm"] == in_high_precision
    for mine, reference, expected in zip(ours, run(exact, torch.float32), ERRORS[recipe], strict=True):
        error = ((mine - reference).norm() / reference.norm()).item()
        assert 0.6 * expected < error < 1.5 * expected


def test_every_linear_layer_of_a_block_is_converted_and_trains() -> None:
    model = convert(tiny_llama())
    assert len(converted(model)) == 2 * 7
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(256, (2, 16))
    with CountedGemms() as gemms:
        model(tokens, tokens).backward()
    assert gemms.count == {"float8_mm": 3 * 2 * 7, "mm": 3}  # the output layer's
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_names_and_weights_of_the_model_stay() -> None:
    before, model = tiny_llama().state_dict(), convert(tiny_llama())
    assert list(model.state_dict()) == list(before)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_no_recipe_is_tensorwise() -> None:
    layer = convert(nn.Sequential(nn.Linear(32, 32)))[0]  # type: ignore[index]
    assert layer.gemms == FLOAT8_SECTION.recipes["tensorwise"].gemms


def test_the_users_list_stays_as_it_was() -> None:
    entries = ["auto_filter_small_kn", "output"]
    with pytest.raises(ConfigError):
        convert(tiny_llama(), filter_fqns=entries)
    assert entries == ["auto_filter_small_kn", "output"]


def test_layers_in_the_filter_are_left_alone() -> None:
    model = convert(tiny_llama(), filter_fqns=["output", "attention.wk", "layers.1"])
    assert converted(model) == [
        f"layers.0.{name}"
        for name in ("attention.wq", "attention.wv", "attention.wo", *(f"feed_forward.w{n}" for n in (1, 2, 3)))
    ]


def test_nothing_to_convert_is_an_error_that_says_why() -> None:
    # The result of torchtitan's automatic filter on a small model, which would silently train in bfloat16.
    with pytest.raises(ConfigError, match=r"float8 would convert no layer.* K = 64 <= 4096 and N = 64 <= 1024"):
        convert(tiny_llama(), filter_fqns=["auto_filter_small_kn"])
    with pytest.raises(ConfigError, match=r"float8 would convert no layer.* K = 24 is not a multiple of 16"):
        convert(nn.Sequential(nn.Linear(24, 32)))


def test_a_gpu_without_float8_is_refused_unless_emulated() -> None:
    ampere = Target("meta", compute_capability=(8, 0))  # "meta": nothing is run on it
    with pytest.raises(ConfigError, match=r"8\.9 .*float8\.emulate"):
        apply_converters(nn.Sequential(nn.Linear(32, 32)), ["float8"], lambda _: Float8(), ampere)
    model = nn.Sequential(nn.Linear(32, 32))
    apply_converters(model, ["float8"], lambda _: Float8(emulate=True), ampere)
    assert converted(model) == ["0"]


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [((8, 0), torch.float8_e4m3fn, 0), ((8, 0), torch.int8, 1), ((9, 0), torch.float8_e4m3fn, 1)],
)
def test_only_gpus_with_float8_compile_its_rounding(
    capability: tuple[int, int], dtype: torch.dtype, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton knows no float8 of an A100, where an emulated recipe rounds by torch's operations."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        fused(lambda x, dtype: x.to(dtype))(torch.empty(32, 32, device="cuda"), dtype)
    assert len(compiled) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"enable_fsdp_float8_all_gather": True, "recipe_name": "rowwise"},
        {"precompute_float8_dynamic_scale_for_fsdp": True},
    ],
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"float8.{next(iter(keys))}"):
        convert(tiny_llama(), **keys)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_compute_what_torchaos_do(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    linear = nn.Linear(64, 96).bfloat16()
    linear.weight.data.mul_(torch.logspace(0, -4, 64))  # one scale makes columns subnormal, a scale for each does not
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    layers = [Float8Linear.from_float(copy.deepcopy(linear), config=config)]
    layers += [convert(nn.Sequential(linear), recipe_name=recipe)[0]]  # type: ignore[index]
    x, grad = torch.randn(2, 48, 64).bfloat16(), torch.randn(2, 48, 96).bfloat16()
    results = []
    for layer in layers:
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.backward(grad)
        results.append([out, leaf.grad, layer.weight.grad, layer.bias.grad])
    for expected, actual in zip(*results, strict=True):
        error, size = ((t.float().reshape(-1, t.shape[-1])).norm(dim=0) for t in (actual - expected, expected))
        assert (error <= 0.005 * size).all()  # rounding to bfloat16


def test_the_report_rounds_rows_as_the_recipe_does() -> None:
    """With scales that are powers of two."""
    x = torch.randn(16, 64)
    exact = LinearConverter(FLOAT8_SECTION, Float8(recipe_name="rowwise"), Target("cpu")).scaled(x, "x").exact
    assert (torch.frexp(exact / x).mantissa == 0.5).all()
    assert (exact.abs().amax(1) <= 448).all() and (exact.abs().amax(1) > 224).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_by_exponent_equal_those_by_division(dtype: torch.dtype) -> None:
    """In every bit, as their inverses do: for all mantissas around the smallest amax, 1 and the largest number; and for
    all exponents, so zero, subnormal numbers, infinity and NaN too, with those around the largest number's mantissa."""

    def amaxes(exponents: Any, mantissas: torch.Tensor) -> torch.Tensor:
        bits = (torch.tensor(exponents)[:, None] << 23) + mantissas
        return bits.int().view(torch.float32).flatten()

    few = torch.cat([torch.arange(3), 0x600000 + torch.arange(-3, 4), 2**23 - 1 - torch.arange(3)])
    for amax in (amaxes(range(256), few), -amaxes([255], few), amaxes([86, 87, 88, 127, 254], torch.arange(2**23))):
        by_division = powers_of_two(float8_scale(amax, dtype))
        expected = by_division, by_division.reciprocal()
        for ours, theirs in zip(scale_by(amax, "rowwise", dtype), expected, strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_the_output_layer_stays_in_bf16_unless_the_filter_says_otherwise() -> None:
    assert "output" not in converted(convert(tiny_llama()))
    assert "output" in converted(convert(tiny_llama(), filter_fqns=["layers.0"]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_rounds_the_output_layers_weight_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a chunk. Rowwise, each of the two GEMMs that multiply by it needs a copy of its own."""
    monkeypatch.setattr(loss, "CHUNK_MULTIPLE", 32)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 32 * 256)
    model: Any = convert(nn.ModuleDict({"output": nn.Linear(64, 256, bias=False)}), recipe_name=recipe, filter_fqns=[])
    rounded = Counter[torch.Size]()
    original = rounding.round_to_each

    def count(x: torch.Tensor, *arguments: Any) -> Any:
        rounded[x.shape] += 1
        return original(x, *arguments)

    monkeypatch.setattr(rounding, "round_to_each", count)
    hidden, labels = torch.randn(1, 160, 64, requires_grad=True), torch.zeros(1, 160, dtype=torch.long)
    output = model["output"]
    for number in (1, 2):  # the weight may have changed before the second pass
        with weight_unchanged(output):
            loss.chunked_cross_entropy(output, output.weight, hidden, labels)
        assert rounded[output.weight.shape] == (1 if recipe == "tensorwise" else 2) * number
        assert rounded[torch.Size([32, 64])] == 5 * number
