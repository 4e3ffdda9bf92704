"""What a GPU's attention and norms save for the backward pass, determined without a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.kernels.attention import attend
from torchtitan.kernels.dispatch import KERNELS, device_type
from torchtitan.kernels.exact_gemm import exact_linear
from torchtitan.kernels.matmul_8bit import float8_matmul
from torchtitan.kernels.quantize import Quantized
from torchtitan.models.norm import RMSNorm
from torchtitan.protocols import AttentionSpec
from torchtitan.tools.plan import recorder as recorder_module
from torchtitan.tools.plan.kernel_substitutes import kernel_substitutes
from torchtitan.tools.plan.recorder import Recorder


def test_flash_attention_keeps_its_operands_output_and_log_sum_exp() -> None:
    """On a GPU and on CPU. Grouped keys and values are not repeated."""
    heads, kv_heads, seq, head_dim = 8, 2, 512, 32
    kept, flops = {}, {}
    for device in ("cuda", "cpu"):
        with FakeTensorMode() as mode, Recorder(str, mode) as recorder, kernel_substitutes(device):
            shapes = [(1, count, seq, head_dim) for count in (heads, kv_heads, kv_heads)]
            q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
            out = attend(AttentionSpec(), q, k, v, None)
            kept[device] = recorder.current
            out.sum().backward()
            assert k.grad is not None and k.grad.shape == k.shape
            flops[device] = recorder.work.flops
    row = 2 * seq * head_dim  # bytes per head
    log_sum_exp = 4 * heads * seq
    flash = (2 * heads + 2 * kv_heads) * row + log_sum_exp
    assert kept["cuda"] - flash in range(64)  # plus a random state
    assert kept["cpu"] == flash
    assert flops["cpu"] == flops["cuda"] == (2 + 5) * heads * seq**2 * head_dim


@pytest.mark.parametrize("norm_class", [nn.RMSNorm, RMSNorm], ids=["torch's", "ours"])
def test_a_norm_keeps_its_input_and_a_number_a_row(norm_class: type[nn.RMSNorm]) -> None:
    with FakeTensorMode() as mode, Recorder(str, mode) as recorder, kernel_substitutes("cuda"):
        x = torch.empty(16, 256, dtype=torch.bfloat16, requires_grad=True)
        norm = norm_class(256, dtype=torch.bfloat16)
        weight = norm.weight
        out = norm(x)
        assert recorder.current == x.nbytes + weight.nbytes + out.nbytes + 4 * 16


def test_only_rows_and_the_device_are_replaced_and_only_within() -> None:
    functions, rows = (F.scaled_dot_product_attention, F.rms_norm), dict(KERNELS)
    with kernel_substitutes("cuda"):
        assert device_type(torch.ones(1)) == "cuda" and KERNELS["rms_norm"] != rows["rms_norm"]
        assert (F.scaled_dot_product_attention, F.rms_norm) == functions
    assert device_type(torch.ones(1)) == "cpu" and rows == KERNELS


@pytest.mark.parametrize(("device", "copies"), [("cuda", 0), ("cpu", 1)])
def test_the_simulated_device_multiplies_bfloat16(device: str, copies: int) -> None:
    """A router keeps float32 copies of its operands on a CPU only."""
    with FakeTensorMode() as mode, Recorder(str, mode) as recorder, kernel_substitutes(device):
        x, weight = (torch.empty(rows, 32, dtype=torch.bfloat16, requires_grad=True) for rows in (64, 8))
        out = exact_linear(x, weight)
        assert recorder.current == (1 + 2 * copies) * (x.nbytes + weight.nbytes) + out.nbytes
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize(("device", "sums"), [("cpu", 4), ("cuda", 0)])
def test_the_planning_machine_changes_no_plan_of_a_gpu(device: str, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without bfloat16 instructions, GEMMs write float32 sums to memory, but only there."""
    monkeypatch.setattr(recorder_module, "_sums_in_memory", lambda: True)
    with FakeTensorMode() as mode, Recorder(str, mode, device) as recorder:
        x = torch.empty(16, 16, dtype=torch.bfloat16)
        out = x @ x
        assert max(recorder.peaks.values()) == x.nbytes + out.nbytes + sums * out.numel()


def test_rowwise_float8_is_planned_without_a_gpu() -> None:
    with FakeTensorMode() as mode, Recorder(str, mode) as recorder, kernel_substitutes("cuda"):
        data = torch.empty(32, 32, dtype=torch.float8_e4m3fn)
        out = float8_matmul(Quantized(data, torch.empty(32, 1)), Quantized(data, torch.empty(1, 32)), torch.bfloat16)
        assert out.shape == (32, 32) and recorder.work.flops_8bit == 2 * 32**3
