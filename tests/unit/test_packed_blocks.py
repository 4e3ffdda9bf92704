"""GEMMs in block-scaled formats as GPUs get them: operands and layers, with the product's definition on CPU.

(The kernels that pack on a GPU, and what the compiler makes of these layers: tests/cross.)
"""

import copy
import dataclasses
from typing import Any

import block_definitions
import pytest
import torch
from block_definitions import swizzle, unpack, unswizzle
from tiny import SPARSE
from torch import nn
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import to_blocked

from torchtitan.config.low_precision import MX, Float8
from torchtitan.converters import Target
from torchtitan.converters.gemm_check import checked_gemms
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.recipes import FLOAT8_SECTION, MX_SECTION
from torchtitan.errors import ConfigError
from torchtitan.kernels.block_formats import BLOCK_FORMATS, NVFP4, quantize_blocks
from torchtitan.kernels.packed_blocks import (
    _survey,
    block_mm,
    pack_blocks,
    pack_both,
)
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.moe import SparseTransformer
from torchtitan.protocols import Passes

block_definitions.register()
FORMATS_OF_GPUS = {name: known.format for name, known in BLOCK_FORMATS.items() if name != "mxint8"}
FORMATS_OF_GPUS |= {
    f"mxfp8, {mode}": BLOCK_FORMATS["mxfp8"].format._replace(scale_mode=mode) for mode in ("floor", "even", "ceil")
}
FORMATS_OF_GPUS["nvfp4, transformed"] = NVFP4._replace(hadamard=True)
B200, H100 = (Target("meta", compute_capability=capability, tokens=128) for capability in ((10, 0), (9, 0)))
RECIPES: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "weight gradient in bf16": {"wgrad_with_hp": True},
    "output in bf16": {"forward_with_hp": True},
    "mxfp8": {"recipe_name": "mxfp8"},
    "mxfp8, output in bf16": {"recipe_name": "mxfp8", "forward_with_hp": True},
    "without its ingredients": {"weight_scales_2d": False, "random_hadamard": False, "stochastic_rounding": False},
}


def converters(recipe: str) -> tuple[LinearConverter, LinearConverter]:
    """A GPU's, and the emulated one."""
    if recipe == "blockwise":
        return tuple(
            LinearConverter(FLOAT8_SECTION, Float8(recipe_name="blockwise", emulate=e), H100) for e in (False, True)
        )  # type: ignore[return-value]
    return tuple(
        LinearConverter(MX_SECTION, MX(**{"recipe_name": "nvfp4", "emulate": e, **RECIPES[recipe]}), B200)
        for e in (False, True)
    )  # type: ignore[return-value]


def uneven(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.randn(rows, 1).exp()


def gemms_of(layer: Any, x: torch.Tensor, out_grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], out_grad)]


@pytest.mark.parametrize("name", FORMATS_OF_GPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_numbers_follow_the_definition(name: str, dtype: torch.dtype) -> None:
    form = FORMATS_OF_GPUS[name]
    for x in (uneven(128, 384).to(dtype), uneven(384, 256).to(dtype).t()):
        assert torch.equal(unpack(pack_blocks(x, form)), quantize_blocks(x, form).dequantize(torch.float64))


@pytest.mark.parametrize(
    "name, transform", [("nvfp4", True), ("nvfp4 gradients", True), ("float8 1x128", False), ("mxfp8", False)]
)
def test_a_matrix_and_its_transpose_are_packed_as_one_by_one(name: str, transform: bool) -> None:
    form = BLOCK_FORMATS[name].format
    transposed, x = form._replace(hadamard=transform), uneven(128, 256)
    by_row, by_column = pack_both(x, form, transposed)
    assert torch.equal(unpack(by_row), unpack(pack_blocks(x, form)))
    assert torch.equal(unpack(by_column), unpack(pack_blocks(x.t(), transposed)))


def test_nvfp4_is_packed_as_torchao_does_bit_for_bit() -> None:
    x = uneven(160, 224)
    packed = pack_blocks(x, NVFP4)
    tensor_scale = per_tensor_amax_to_scale(x.abs().amax())
    scale, data = nvfp4_quantize(x, per_tensor_scale=tensor_scale)
    assert torch.equal(packed.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(packed.scale.view(torch.uint8), to_blocked(scale.view(torch.uint8)).flatten())
    assert packed.tensor_scale is not None and torch.equal(packed.tensor_scale, tensor_scale)


def test_scales_return_from_their_layout() -> None:
    scale = uneven(70, 9).abs().to(torch.float8_e4m3fn).float()
    assert torch.equal(unswizzle(swizzle(scale), 70, 9), scale)


@pytest.mark.parametrize(
    "left, right",
    [
        ("nvfp4", "nvfp4 weights"),
        ("nvfp4 gradients", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("float8 1x128", "float8 128x128"),
        ("float8 1x128", "float8 1x128"),
    ],
)
def test_the_product_is_exact(left: str, right: str) -> None:
    # With 128 columns of the result and 16,384 terms, scales of 128 x 128 have as many rows as scales of 1 x 128.
    for m, n, k in ((32, 256, 128), (64, 128, 512), (16, 128, 16384)):
        x, weight = uneven(m, k), uneven(n, k)
        forms = BLOCK_FORMATS[left].format, BLOCK_FORMATS[right].format
        product = block_mm(pack_blocks(x, forms[0]), pack_blocks(weight, forms[1]), torch.float32)
        exact = [quantize_blocks(*pair).dequantize(torch.float64) for pair in zip((x, weight), forms, strict=True)]
        assert torch.equal(product, (exact[0] @ exact[1].t()).float())


@pytest.mark.parametrize("recipe", [*RECIPES, "blockwise"])
def test_a_layer_computes_as_the_emulated_one(recipe: str) -> None:
    real, emulated = converters(recipe)
    linear = nn.Linear(128, 256)
    x, out_grad = torch.randn(2, 64, 128), torch.randn(2, 64, 256)
    low = gemms_of(real.swap(copy.deepcopy(linear)), x, out_grad)
    for actual, expected in zip(low, gemms_of(emulated.swap(linear), x, out_grad), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_any_number_of_tokens_will_do() -> None:
    """The last batch of a validation may be shorter than those that the filter knows."""
    x, out_grad = torch.randn(1, 37, 128), torch.randn(1, 37, 256)
    for recipe in ("nvfp4", "mxfp8", "blockwise"):
        real, emulated = (converter.swap(nn.Linear(128, 256)) for converter in converters(recipe))
        emulated.load_state_dict(real.state_dict())
        pairs = zip(gemms_of(real, x, out_grad), gemms_of(emulated, x, out_grad), strict=True)
        for place, (actual, expected) in enumerate(pairs):
            # The noise of nvfp4's weight gradient depends on the size that is filled up.
            error = 0.3 if recipe == "nvfp4" and place == 2 else 1e-5
            assert (actual - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize("recipe", ["nvfp4", "output in bf16", "mxfp8", "blockwise"])
def test_a_layer_traces_as_one_graph(recipe: str) -> None:
    layer = converters(recipe)[0].swap(nn.Linear(128, 256).bfloat16())
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, out_grad = torch.randn(2, 64, 128).bfloat16(), torch.randn(2, 64, 256).bfloat16()
    for actual, expected in zip(gemms_of(layer, x, out_grad), gemms_of(compiled, x, out_grad), strict=True):
        assert torch.equal(actual, expected)


def test_operators_are_as_the_compiler_takes_them() -> None:
    x = uneven(64, 128).t()
    torch.library.opcheck(torch.ops.torchtitan.survey_nvfp4.default, (x, True, True, False))
    checks = ("test_faketensor", "test_autograd_registration")  # the others cannot compare float8
    pack_nvfp4, survey = torch.ops.torchtitan.pack_nvfp4.default, _survey(x, True, True, False)
    torch.library.opcheck(pack_nvfp4, (x, survey, False, True, True), test_utils=checks)
    torch.library.opcheck(torch.ops.torchtitan.pack_mx.default, (x, "floor", True), test_utils=checks)
    for form in (NVFP4, BLOCK_FORMATS["mxfp8"].format, BLOCK_FORMATS["float8 1x128"].format):
        left, right = pack_blocks(uneven(64, 128), form), pack_blocks(uneven(128, 128), form)
        operands = (*left, right.data.t(), *right[1:], torch.bfloat16)
        torch.library.opcheck(torch.ops.torchtitan.block_mm.default, operands, test_utils=checks)


@pytest.mark.parametrize("recipe, bits", [("nvfp4", 4.5), ("mxfp8", 8.25), ("blockwise", 8.25)])
def test_the_input_is_kept_in_few_bits(recipe: str, bits: float) -> None:
    """As the weight gradient needs it, with its scales."""
    layer = converters(recipe)[0].swap(nn.Linear(128, 256, bias=False).bfloat16())
    x = torch.randn(128, 128).bfloat16().requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    others = [tensor.nbytes for tensor in sizes if tensor.data_ptr() != layer.weight.data_ptr()]
    assert 8 * sum(others) == pytest.approx(bits * x.numel(), rel=0.01)


@pytest.mark.parametrize("recipe, reason", [("nvfp4", r"K = 48 is not a multiple of 32"),
                                            ("mxfp8", r"K = 48 is not a multiple of 32"),
                                            ("blockwise", r"K = 48 is not a multiple of 128")])  # fmt: skip
def test_a_model_runs_the_promised_gemms(recipe: str, reason: str) -> None:
    converter = converters(recipe)[0]
    args = LlamaArgs(dim=128, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=256, vocab_size=256)
    model = Llama(args).bfloat16()
    model.layers["0"].feed_forward.extra = nn.Linear(48, 128)
    converter.convert(model)
    reasons = {decision.fqn: decision.reason for decision in converter.decisions}
    assert reason[:6] in reasons["layers.0.feed_forward.extra"]
    tokens = torch.randint(256, (2, 64))
    passes = {decision.fqn: Passes(1, 1) for decision in converter.decisions if decision.converted}
    with checked_gemms(model, [converter], passes, compiled=False):
        model(tokens).float().logsumexp(-1).sum().backward()
    assert not model.layers["0"].attention.wq.gemms.x.emulate


@pytest.mark.parametrize("recipe, key", [("nvfp4", "mx"), ("blockwise", "float8")])
def test_experts_are_only_emulated(recipe: str, key: str) -> None:
    args = dataclasses.replace(SPARSE, vocab_size=256, dim=128, moe=dataclasses.replace(SPARSE.moe, ffn_dim=128))
    real, emulated = converters(recipe)
    with torch.device("meta"):
        emulated.convert(SparseTransformer(args))
        with pytest.raises(
            ConfigError, match=rf"experts only emulated; add moe\.experts to {key}\.filter_fqns, or set"
        ):
            real.convert(SparseTransformer(args))


def test_devices_without_the_gemms_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"mx needs a GPU of compute capability 10\.0 or above, .* has 9\.0; .* mx\.em"
    ):
        LinearConverter(MX_SECTION, MX(recipe_name="nvfp4"), H100)
    with pytest.raises(ConfigError, match=r"a CPU has no mx GEMMs; remove mx, or set mx\.emulate"):
        LinearConverter(MX_SECTION, MX(recipe_name="nvfp4"), Target("cpu"))
    with pytest.raises(
        ConfigError, match=r"blockwise needs a GPU of compute capability 9\.0, .* has 10\.0; set float8\.e"
    ):
        LinearConverter(FLOAT8_SECTION, Float8(recipe_name="blockwise"), B200)
    LinearConverter(FLOAT8_SECTION, Float8(recipe_name="blockwise", emulate=True), B200)
    here = Target("cuda", compute_capability=(9, 0))
    for version in (None, "12.8"):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(
            ConfigError, match=rf"needs torch for CUDA 12\.9 or later, but this one is for {version or 'none'}"
        ):
            LinearConverter(FLOAT8_SECTION, Float8(recipe_name="blockwise"), here)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    LinearConverter(FLOAT8_SECTION, Float8(recipe_name="blockwise"), here)
