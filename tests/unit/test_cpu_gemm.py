"""8-bit GEMMs on CPU and the rounding before them, compared with torch's own operations and with float64."""

import pytest
import torch

from torchtitan.kernels import cpu_gemm, rounding
from torchtitan.kernels.matmul_8bit import float8_matmul, int8_matmul
from torchtitan.kernels.quantize import Quantized, powers_of_two

pytestmark = pytest.mark.usefixtures("two_threads")
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def all_bfloat16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, except for the sign of NaN."""
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    assert torch.equal(actual.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


@pytest.mark.parametrize("dtype", rounding.DTYPE_CODES, ids=str)
def test_rounding_is_torchs(dtype: torch.dtype) -> None:
    assert rounding.rounding_library() is not None  # else both would be torch's
    torch.manual_seed(0)
    wide = torch.randn(300, 130) * torch.exp2(torch.randint(-20, 20, (300, 130)).float())
    for x in (all_bfloat16(), torch.randn(37, 65), wide):
        x = x.nan_to_num() if dtype == torch.int8 else x
        by_row, by_column = torch.rand(x.shape[0], 1) + 0.5, torch.rand(1, x.shape[1]) * 100
        for scale in (torch.tensor(1.0), by_row, by_column):
            assert_same(rounding.round_to(x, scale, dtype), rounding._round_by_torch(x, scale, dtype))
        scales = by_row, by_column
        for rounded, scale in zip(rounding.round_to_each(x, scales, dtype), scales, strict=True):
            assert_same(rounded, rounding._round_by_torch(x, scale, dtype))


@pytest.mark.parametrize("dtype", rounding.DTYPE_CODES, ids=str)
def test_all_numbers_widen_exactly(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16).view(dtype)
    powers = torch.exp2(torch.arange(-8, 8).float())
    for scale in (torch.tensor(1.0), powers.view(16, 1), powers.view(1, 16)):
        for wide in (torch.bfloat16, torch.float32):
            expected, out = (numbers.float() * scale).to(wide), torch.empty(16, 16, dtype=wide)
            assert torch.equal(rounding.widen(numbers, scale, out).nan_to_num(7), expected.nan_to_num(7))


def test_amax_shows_nan_and_infinity_where_they_are() -> None:
    x = torch.randn(300, 130).bfloat16()
    x[3, 4], x[5, 6] = float("nan"), -float("inf")
    for ours, dim in zip(rounding.amax_both(x), (1, 0), strict=True):
        expected = x.abs().amax(dim, keepdim=True).float()
        assert torch.equal(ours.isnan(), expected.isnan()) and torch.equal(ours.nan_to_num(), expected.nan_to_num())
    assert torch.equal(rounding.amax(x).nan_to_num(), rounding.amax_both(x)[0].nan_to_num())


@pytest.mark.parametrize("low", [True, False], ids=["multiplied in bfloat16", "multiplied in float32"])
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "tensorwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float8_gemm_is_exact(dtype: torch.dtype, rowwise: bool, low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accurate as float64 sums rounded once: to float32's last bits, or to the nearest bfloat16."""
    monkeypatch.setattr(cpu_gemm, "fast_dtype", lambda: torch.bfloat16 if low else torch.float32)
    torch.manual_seed(0)
    a, b = torch.randn(48, 200).to(FLOAT8[1]), torch.randn(72, 200).to(FLOAT8[0]).T  # as in gᵀ x
    scales = (torch.rand(48, 1) + 0.1, torch.rand(1, 72) + 0.1) if rowwise else (torch.tensor(0.3), torch.tensor(1.7))
    left, right = (
        Quantized(data, powers_of_two(scale) if rowwise else scale) for data, scale in zip((a, b), scales, strict=True)
    )
    exact = left.dequantize(torch.float64) @ right.dequantize(torch.float64)
    sums = left.dequantize(torch.float64).abs() @ right.dequantize(torch.float64).abs()
    error = (float8_matmul(left, right, dtype).double() - exact).abs()
    assert (error <= 2.0**-20 * sums + (2.0**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()
    for transposed in (Quantized(a.T.contiguous().T, left.scale_inverse), left):  # any strides
        assert torch.equal(float8_matmul(transposed, right, dtype), float8_matmul(left, right, dtype))


@pytest.mark.parametrize("fast", [True, False], ids=["int8 instructions", "multiplied in float32"])
def test_int8_gemm_is_exact(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(cpu_gemm, "int8_is_fast", lambda: False)
        monkeypatch.setattr(cpu_gemm, "int8_library", lambda: None)
    a, b = (torch.full(shape, 127, dtype=torch.int8) for shape in ((17, 5000), (5000, 33)))  # beyond float32's 2^24
    a[:, ::2] = 126
    scale, rows = torch.ones(1, 1), torch.arange(17).view(17, 1) + 1.0
    expected = ((a.long() @ b.long()).float() * rows).bfloat16()
    assert torch.equal(int8_matmul(Quantized(a, rows), Quantized(b, scale), torch.bfloat16), expected)
    assert torch.equal(
        int8_matmul(Quantized(a, rows), Quantized(b, scale), torch.bfloat16),
        int8_matmul(Quantized(a, rows), Quantized(b, scale), torch.bfloat16, emulate=True),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_int8_gemm_in_any_strides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((100, 96), (96, 300)))
    for rows, columns in [(torch.rand(100, 1), torch.rand(1, 300)), (torch.rand(1, 1), torch.rand(1, 1))]:
        expected = int8_matmul(Quantized(a, rows), Quantized(b, columns), dtype, emulate=True)
        for left in (a, a.T.contiguous().T):
            for right in (b, b.T.contiguous().T):
                assert torch.equal(int8_matmul(Quantized(left, rows), Quantized(right, columns), dtype), expected)
