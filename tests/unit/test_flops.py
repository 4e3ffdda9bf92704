"""FLOPs per token, peaks of devices, and the messages about them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.metrics import flops
from torchtitan.metrics.flops import MeasuredPeak, Peak, describe_mfu, find_peak, flops_per_token, known_peak
from torchtitan.models.deepseek_v3 import DEEPSEEK_V3
from torchtitan.models.llama.args import LLAMA3, LlamaArgs
from torchtitan.models.llama.model import Llama


def test_formula_counts_what_torch_counts() -> None:
    """torch's counter sees a query-key and a value GEMM over the entire sequence, as the formula does."""
    args = LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=50)
    seq_len = 32
    with torch.device("meta"):
        model = Llama(args)
        tokens = torch.zeros(1, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        model(tokens).sum().backward()
    matrices = sum(
        weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2 and "tok" not in name
    )
    expected = flops_per_token(matrices, args, seq_len)
    assert counter.get_total_flops() / seq_len == pytest.approx(expected, rel=1e-3)


def test_flops_of_llama_3_8b() -> None:
    args = LLAMA3["8B"]
    assert flops_per_token(7_504_924_672, args, 8192) == pytest.approx(5.79e10, rel=1e-3)


def test_flops_of_deepseek_v3_with_values_narrower_than_keys() -> None:
    """250 GFLOPs with causal attention, as its makers count (arXiv 2505.09343, table 2)."""
    args = DEEPSEEK_V3["671B-A37B"]
    attention = 6 * 61 * 128 * (192 + 128) * 4096
    active = 37_552_282_624 - 129280 * 7168  # of a token, without the embedding
    assert flops_per_token(active, args, 4096) == pytest.approx(6 * active + attention)
    assert flops_per_token(active, args, 4096) - attention / 2 == pytest.approx(250e9, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Some Card 9000", None),
    ],
)
def test_peaks_by_name(name: str, teraflops: float | None) -> None:
    assert known_peak(name) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_peak_of_a_gpu_is_known_for_bfloat16_alone() -> None:
    peak = find_peak("cuda", "NVIDIA H200", torch.bfloat16)
    assert peak is not None and peak.flops == 989e12 and "NVIDIA H200" in peak.source
    assert find_peak("cuda", "NVIDIA H200", torch.float32) is None
    assert find_peak("cuda", "Some Card 9000", torch.bfloat16) is None


def test_peak_of_a_cpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no peak from an earlier run, which this may be far below
    peak = find_peak("cpu", "any", torch.float32)
    assert peak is not None and peak.source == "float32 GEMM, measured"
    assert 1e7 < peak.flops < 1e15


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rates that successive GEMM measurements will return; the cache is empty."""
    rates: list[float] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flops, "measure_peak", lambda *_: rates.pop(0))
    return rates


def test_best_measurement_of_this_and_earlier_runs_counts(rates: list[float], tmp_path: Path) -> None:
    rates += [1e12, 2e12, 1.5e12, 1.6e12, 1.7e12]
    peak = MeasuredPeak("a CPU", torch.bfloat16)
    while peak.uncertain:
        peak.measure()
    assert not rates and peak.flops == 2e12 and peak.mfu(1e12) == 0.5
    rates += [0.4e12, 0.4e12, 3e12, 1e12]
    busy = MeasuredPeak("a CPU", torch.bfloat16)
    assert busy.flops == 2e12 and "20% of that now, so the machine is busy" in describe_mfu(busy)
    assert MeasuredPeak("a CPU", torch.float32).flops == 0.4e12
    assert MeasuredPeak("a CPU", torch.bfloat16).flops == 3e12
    file = tmp_path / "torchtitan" / "measured_peaks.json"
    assert max(json.loads(file.read_text()).values()) == 3e12
    for damaged in ("[1]", "{", file.read_text().replace("3000000000000.0", '"much"')):
        file.write_text(damaged)
        rates += [1e12]
        assert MeasuredPeak("a CPU", torch.bfloat16).flops == 1e12


def test_no_share_of_a_measured_peak_that_the_run_exceeds(rates: list[float]) -> None:
    rates += [1e12] * 6 + [4e12]
    peak = MeasuredPeak("a CPU", torch.bfloat16)
    while peak.uncertain:
        peak.measure()
    assert (peak.mfu(0.5e12), peak.mfu(2e12), peak.mfu(1.5e12)) == (0.5, None, None)
    for share in (None, 0.5):
        assert peak.uncertain
        peak.measure()
        assert peak.mfu(2e12) == share
    assert not peak.uncertain


def test_description() -> None:
    assert describe_mfu(None) == "MFU is unknown: no peak FLOP/s is known for this device and dtype"
    assert describe_mfu(Peak(989e12, "H100")) == "MFU counts 6N plus full attention; peak 989 TFLOP/s (H100)"
    assert "peak 0.25 TFLOP/s" in describe_mfu(Peak(0.25e12, "measured"))
