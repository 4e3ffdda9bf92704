"""The numbers of the int8 GEMM for GPUs, in Triton's interpreter, on CPU."""

import os
import subprocess
import sys

import pytest
from simulated import needs_triton

pytestmark = needs_triton

PROGRAM = """
import torch
from torchtitan.kernels.int8_triton import int8_gemm, int8_gemm_kernel
from torchtitan.kernels.matmul_8bit import int8_matmul
from torchtitan.kernels.quantize import quantize, quantize_columns

torch.manual_seed(0)
for m, n, k in [(128, 64, 96), (70, 33, 48), (16, 200, 200)]:
    for recipe in ("rowwise", "tensorwise"):
        for dtype in (torch.bfloat16, torch.float32):
            a = quantize(torch.randn(m, k), recipe)
            b = quantize_columns(torch.randn(k, n), recipe)
            expected = int8_matmul(a, b, dtype, emulate=True)
            found = int8_gemm(
                a.data, a.scale_inverse, b.data.t().contiguous().t(), b.scale_inverse, dtype,
                kernel=int8_gemm_kernel, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64,
            )
            assert found.dtype == dtype
            # The interpreter truncates to bfloat16, where a GPU rounds.
            torch.testing.assert_close(found, expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-6)
"""


@pytest.mark.filterwarnings("ignore")
def test_it_multiplies_and_scales_as_the_reference_does() -> None:
    """Sizes that fill tiles and that do not."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
