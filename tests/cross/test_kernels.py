"""The numbers of our kernels for GPUs, in Triton's interpreter, on CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import needs_triton

pytestmark = needs_triton

UNTUNED = """
import triton


class Untuned:
    '''A kernel with tiles that suit the tests' matrices. (Tuning needs a GPU.)'''

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **constants: self.kernel[grid](*args, **constants, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64)

    @property
    def best_config(self):
        return triton.Config({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64}, num_warps=4)

"""

GEMM = (
    UNTUNED
    + """
import torch
from torchtitan.kernels import gemm_triton
from torchtitan.kernels.matmul_8bit import int8_matmul
from torchtitan.kernels.quantize import quantize, quantize_columns

gemm_triton.tuned_int8 = Untuned(gemm_triton.int8_gemm_kernel)
torch.manual_seed(0)
for m, n, k in [(128, 64, 96), (70, 33, 48), (16, 200, 200)]:
    for recipe in ("rowwise", "tensorwise"):
        for dtype in (torch.bfloat16, torch.float32):
            a = quantize(torch.randn(m, k), recipe)
            b = quantize_columns(torch.randn(k, n), recipe)
            expected = int8_matmul(a, b, dtype, emulate=True)
            actual = gemm_triton.int8_gemm(*a, b.data.t().contiguous().t(), b.scale_inverse, dtype)
            assert actual.dtype == dtype
            # The interpreter truncates to bfloat16, where a GPU rounds.
            torch.testing.assert_close(actual, expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-6)
"""
)


CONFIGURATIONS = """
import torch
from torchtitan.kernels import gemm_triton
from torchtitan.kernels.matmul_8bit import int8_matmul
from torchtitan.kernels.quantize import quantize, quantize_columns

torch.manual_seed(0)
a, b = quantize(torch.randn(150, 300), "rowwise"), quantize_columns(torch.randn(300, 270), "rowwise")
b = b._replace(data=b.data.t().contiguous().t())
expected = int8_matmul(a, b, torch.float32, emulate=True)
for config in gemm_triton.CONFIGS:
    gemm_triton._CHOSEN = {(a.data.device, 256, 270, 300): config.kwargs}
    assert torch.equal(gemm_triton.int8_gemm(*a, *b, torch.float32), expected)
"""


ROUNDING = """
import torch
from torchtitan.kernels.quantize import LARGEST, scale_inverse_of
from torchtitan.kernels.rounding_triton import round_rows_triton
from torchtitan.kernels.rounding import round_to

torch.manual_seed(0)
for shape in [(64, 48), (70, 33), (3, 9, 1000), (30, 90, 16)]:
    for dtype in (torch.bfloat16, torch.float32):
        for low in (torch.int8, torch.float8_e4m3fn):
            x = torch.randn(shape).to(dtype)
            if low.is_floating_point:
                x = (4 * x).round().clamp(-15, 15)  # float8 numbers: Triton's interpreter rounds others wrongly
            x[..., 3, :], x[..., 5, :] = 0, x[..., 5, :] * 1e-33
            x[..., 6, :] = torch.arange(shape[-1]) % 128 - 0.5 if low == torch.int8 else 2  # ties, if the scale is 1
            x[..., 6, 0] = LARGEST if low == torch.int8 else 448
            data, scale_inverse, column_amax = round_rows_triton(x, low)
            amax = x.abs().amax(-1, keepdim=True).float()
            expected = scale_inverse_of(amax, low)
            assert data.dtype == low and torch.equal(scale_inverse, expected)
            flat = round_to(x.flatten(0, -2), expected.flatten(0, -2).reciprocal(), low).view(shape)
            assert torch.equal(data.float(), flat.float())
            assert torch.equal(column_amax, x.abs().amax(-2, keepdim=True).float())
            x[..., 2, 1] = torch.nan
            data, scale_inverse, column_amax = round_rows_triton(x, low)
            assert column_amax.isnan().nonzero()[:, -2:].unique(dim=0).tolist() == [[0, 1]]
            expected = scale_inverse_of(torch.tensor(torch.nan), low).expand(shape[:-2])  # of float8, 0
            torch.testing.assert_close(scale_inverse[..., 2, 0], expected, rtol=0, atol=0, equal_nan=True)
"""


SCALES = """
import torch
import triton
import triton.language as tl
from torchtitan.kernels.quantize import scale_by
from torchtitan.kernels.rounding_triton import constants_of, scales_of

@triton.jit
def kernel(amax, scale, inverse, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, FLOAT8: tl.constexpr, N: tl.constexpr):
    places = tl.program_id(0) * N + tl.arange(0, N)
    scales, inverses = scales_of(tl.load(amax + places), LARGEST, SMALLEST, FLOAT8)
    tl.store(scale + places, scales)
    tl.store(inverse + places, inverses)

exponents = torch.arange(256, dtype=torch.int32)[:, None] << 23
mantissas = torch.cat([torch.arange(2**6), torch.arange(2**23 - 2**6, 2**23), 0x600000 + torch.arange(-(2**6), 2**6)])
amax = (exponents + mantissas.int()).view(torch.float32).flatten()
for dtype in (torch.int8, torch.float8_e4m3fn):
    finite = amax.isfinite() | (dtype != torch.int8)  # NaN has many bits
    out = torch.empty(2, amax.numel())
    kernel[(amax.numel() // 2**14,)](amax, *out, **constants_of(dtype), N=2**14)
    for actual, expected in zip(out, scale_by(amax, "rowwise", dtype)):
        assert torch.equal(actual[finite].view(torch.int32), expected[finite].view(torch.int32))
"""


GROUPED = (
    UNTUNED
    + """
import functools
import itertools
import torch
from torchtitan.kernels.grouped_8bit import grouped_8bit_mm, pad_groups, round_columns_of_rows, round_expert_rows
from torchtitan.kernels import gemm_triton
from torchtitan.kernels.grouped_gemm import ALIGNMENT
from torchtitan.kernels.gemm_triton import grouped_gemm, grouped_gemm_over_rows
from torchtitan.kernels.quantize import Quantized

gemm_triton.tuned_grouped = Untuned(gemm_triton.grouped_kernel)
gemm_triton.tuned_over_rows = Untuned(gemm_triton.over_rows_kernel)
torch.manual_seed(0)
shapes = [((32, 64, 32), 64, 96), ((5, 0, 70, 33, 0), 33, 48), ((0, 1), 200, 100)]
for (counts, n, k), low in itertools.product(shapes, (torch.int8, torch.float8_e4m3fn)):
    ends, experts = torch.tensor(counts).cumsum(0).int(), len(counts)
    x, grad, weight = torch.randn(sum(counts), k), torch.randn(sum(counts), n), torch.randn(experts, n, k)
    forward = round_expert_rows(x, low), round_expert_rows(weight, low).transpose(), ends
    columns = []
    for operand in (grad, x):
        padded, padded_ends = pad_groups(operand, ends, ALIGNMENT)
        columns.append(round_columns_of_rows(padded, padded_ends, low))
    cases = [(functools.partial(grouped_gemm, fast=fast), forward) for fast in (False, True)]
    cases += [(grouped_gemm_over_rows, (*columns, padded_ends))]
    for dtype in (torch.bfloat16, torch.float32):
        for gemm, operands in cases:
            a, b, ends = operands
            expected = grouped_8bit_mm(*a, *b, ends, dtype, True, False)
            actual = gemm(*operands, dtype=dtype)
            assert actual.dtype == dtype
            # In another order, float32 sums of float8 products round otherwise.
            rtol = 2**-7 if dtype == torch.bfloat16 else 0 if low == torch.int8 else 1e-5
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6 if low == torch.int8 else 1e-4)

# A rank to which no token was sent launches nothing: empty launches would choose the tiles of all that follow.
gemm_triton.tuned_grouped = gemm_triton.tuned_over_rows = None
ends = torch.zeros(3, dtype=torch.int32)
a, b = (Quantized(torch.empty(0, n, dtype=torch.int8), torch.ones(3, n)) for n in (32, 64))
assert torch.equal(grouped_gemm_over_rows(a, b, ends, torch.bfloat16), torch.zeros(3, 32, 64, dtype=torch.bfloat16))
weight = Quantized(torch.ones(3, 32, 64, dtype=torch.int8), torch.ones(3, 1, 64))
a = Quantized(torch.empty(0, 32, dtype=torch.int8), torch.empty(0, 1))
assert grouped_gemm(a, weight, ends, torch.bfloat16, fast=False).shape == (0, 64)
"""
)


GROUPED_ROUNDING = """
import torch
from torchtitan.kernels.grouped_8bit import _padded_rows, pad_groups, round_columns_of_rows, round_expert_rows
from torchtitan.kernels.grouped_gemm import ALIGNMENT
from torchtitan.kernels.rounding_triton import round_both

torch.manual_seed(0)
for counts, columns in [((64, 128), 64), ((5, 0, 70, 33, 0), 100)]:
    ends, used, rows = torch.tensor(counts).cumsum(0).int(), torch.tensor(counts) > 0, sum(counts)
    size = _padded_rows(rows, len(counts), ALIGNMENT)
    # Columns of a matrix, as the compiler's passes may hand them on.
    source, factor = torch.randint(rows // 2, (rows, 2))[:, 1], 2.0 ** torch.randint(-3, 3, (rows, 2))[:, 1]
    for dtype in (torch.int8, torch.float8_e4m3fn):
        x = torch.randn(rows, columns) * torch.rand(columns)
        if dtype.is_floating_point:
            x = (4 * x).round().clamp(-15, 15)  # float8 numbers: Triton's interpreter rounds others wrongly
        x[3] = 0
        # With a factor, float8's scales of columns lead to numbers that are not of the format.
        for how in ((), (source,), (source, factor))[: 2 if dtype.is_floating_point else 3]:
            operand = x[source] if how else x
            operand = operand * factor.unsqueeze(1) if len(how) == 2 else operand
            by_row = round_expert_rows(operand, dtype)
            padded, padded_ends = pad_groups(operand, ends, ALIGNMENT)
            by_column = round_columns_of_rows(padded, padded_ends, dtype)
            data, inverse, columns_data, columns_inverse, found_ends = round_both(x, ends, size, dtype, *how)
            assert found_ends.dtype == torch.int32 and torch.equal(found_ends, padded_ends)
            assert torch.equal(inverse, by_row.scale_inverse)
            assert torch.equal(columns_inverse[used], by_column.scale_inverse[used])
            assert torch.equal(data.float(), by_row.data.float())
            end = padded_ends[-1]
            assert torch.equal(columns_data[:end].float(), by_column.data[:end].float())
    x[2, 1] = torch.nan
    _, row_inverse, _, column_inverse, _ = round_both(x, ends, size, torch.int8)
    assert row_inverse.isnan().nonzero().tolist() == [[2, 0]]
    assert column_inverse.isnan().nonzero().tolist() == [[0, 1]]
"""


SWIGLU = """
import torch
from torchtitan.kernels.quantize import quantize_both
from torchtitan.kernels.swiglu_triton import round_gradients

torch.manual_seed(0)
for rows, columns in [(64, 128), (80, 48), (16, 200)]:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        grad, gate, up = (torch.randn(rows, columns, dtype=torch.bfloat16) for _ in range(3))
        if dtype.is_floating_point:  # products are float8 numbers: Triton's interpreter rounds others wrongly
            grad, up = (2.0 ** torch.randint(-2, 3, grad.shape).bfloat16() * grad.sign() for grad in (grad, up))
            gate = 2.0 ** torch.randint(7, 9, gate.shape).bfloat16()  # the sigmoid is 1, or 0
            gate = gate * torch.randn(gate.shape).sign().bfloat16()
        grad[3] = gate[:, 5] = 0
        wide = [x.float().double().requires_grad_() for x in (gate, up)]
        product = torch.nn.functional.silu(wide[0]) * wide[1]
        product.backward(grad.double())
        expected = [quantize_both(x.detach().float(), "rowwise", dtype) for x in (wide[0].grad, wide[1].grad, product)]
        gate_rows, up_rows, row_inverse, *by_column, column_inverse = round_gradients(grad, gate, up, dtype)
        by_row = gate_rows, up_rows
        for i, (in_rows, in_columns) in enumerate(expected):
            found = [(by_column[i], column_inverse[i], in_columns)]
            found += [(by_row[i], row_inverse[i], in_rows)] if i < 2 else []
            for data, inverse, right in found:
                torch.testing.assert_close(inverse, right.scale_inverse, rtol=1e-6, atol=0)
                # The last bit of a number before it is rounded decides rarely, but then by one.
                off = (data.float() - right.data.float()).abs()
                assert off.max() <= 1 and (off > 0).float().mean() < 1e-3, (dtype, i)
up[2, 1] = torch.nan
*_, row_inverse, _, _, _, column_inverse = round_gradients(grad, gate, up, torch.int8)
assert row_inverse.isnan().nonzero().tolist() == [[0, 2, 0]]
assert column_inverse.isnan().nonzero().tolist() == [[0, 0, 1], [2, 0, 1]]
"""


NVFP4 = """
import itertools
import torch
from block_definitions import pack_nvfp4, survey_nvfp4
from torchtitan.kernels.packed_blocks import _pack_nvfp4, _survey

torch.manual_seed(0)
for shape, dtype in itertools.product([(64, 96), (160, 32), (128, 192)], (torch.float32, torch.bfloat16)):
    x = (torch.randn(shape) * torch.randn(shape[0], 1).mul(2).exp()).to(dtype)
    x[3] = x[:32, :32] = 0
    for operand in (x, x.t()):
        for squares, stochastic, hadamard in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]:
            how = bool(stochastic), bool(hadamard)
            survey = _survey(operand, *how, False)
            assert torch.equal(survey, survey_nvfp4(operand, *how, False))
            assert torch.equal(_survey(operand, *how, True), survey_nvfp4(operand, *how, True))
            packed, expected = (p(operand, survey, bool(squares), *how) for p in (_pack_nvfp4, pack_nvfp4))
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(packed[:2], expected[:2]))
            assert torch.equal(packed[2], expected[2])
x[1, 1] = torch.nan
assert _pack_nvfp4(x, _survey(x, False, False, False), False, False, False)[2].isnan()
"""

MX = """
import itertools
from typing import get_args
import torch
from block_definitions import pack_mx
from torchtitan.kernels.block_formats import ScaleMode
from torchtitan.kernels.packed_blocks import _pack_mx

torch.manual_seed(0)
for shape, dtype in itertools.product([(64, 96), (160, 32), (128, 256)], (torch.float32, torch.bfloat16)):
    # float8 numbers: Triton's interpreter rounds others wrongly
    x = (4 * torch.randn(shape)).round().clamp(-15, 15) * 2.0 ** torch.randint(-3, 3, (shape[0] // 32, 1)).repeat(32, 1)
    x[3] = x[:32, :32] = 0
    x[40:45, :32] *= 2.0**-120
    x[33, 1] = torch.inf
    x = x.to(dtype)
    for mode in get_args(ScaleMode):
        for operand, both in ((x, True), (x, False), (x.t(), False)):
            actual, expected = _pack_mx(operand, mode, both), pack_mx(operand, mode, both)
            for ours, reference in zip(actual, expected, strict=True):
                assert ours.dtype == reference.dtype and ours.shape == reference.shape
                if ours.dtype == torch.float8_e8m0fnu:
                    assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8)), (shape, mode)
                else:  # NaN is another number to the interpreter
                    finite = reference.float().isfinite()
                    assert torch.equal(ours.float()[finite], reference.float()[finite]), (shape, mode)
"""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(GEMM, id="GEMM"),
        pytest.param(CONFIGURATIONS, id="GEMM in all configurations"),
        pytest.param(ROUNDING, id="rounding"),
        pytest.param(SCALES, id="scales"),
        pytest.param(GROUPED, id="grouped GEMM"),
        pytest.param(GROUPED_ROUNDING, id="grouped rounding"),
        pytest.param(SWIGLU, id="gradients of SwiGLU"),
        pytest.param(NVFP4, id="nvfp4"),
        pytest.param(MX, id="mx"),
    ],
)
def test_a_kernel_computes_what_the_reference_does(program: str) -> None:
    """Sizes that fill tiles and that do not; of rounding, every bit."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", f"import quick_interpreter\n{program}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
