"""training.mixed_precision_param = auto."""

from pathlib import Path

import pytest
import torch

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.kernels import cpu_speed
from torchtitan.run import compute_dtype
from torchtitan.run.compute_dtype import decide_compute_dtype


def config(folder: Path, *flags: str) -> JobConfig:
    return ConfigManager().parse_args([f"--job.dump_folder={folder}", "--checkpoint.enable_checkpoint", *flags])


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_takes_what_it_multiplies_faster(
    fast: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_dtype, "bfloat16_is_fast", lambda: fast)
    assert decide_compute_dtype(config(tmp_path), "cpu").training.mixed_precision_param == dtype
    assert decide_compute_dtype(config(tmp_path), "cuda").training.mixed_precision_param == "bfloat16"
    for given in ("bfloat16", "float32"):  # set by the user
        chosen = decide_compute_dtype(config(tmp_path, f"--training.mixed_precision_param={given}"), "cpu")
        assert chosen.training.mixed_precision_param == given


def test_a_resumed_run_stays_in_what_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_dtype, "bfloat16_is_fast", lambda: True)
    (tmp_path / "config.toml").write_text('[training]\nmixed_precision_param = "float32"\n')
    assert decide_compute_dtype(config(tmp_path), "cpu").training.mixed_precision_param == "bfloat16"  # nothing saved
    (tmp_path / "checkpoint" / "step-2").mkdir(parents=True)
    assert decide_compute_dtype(config(tmp_path), "cpu").training.mixed_precision_param == "float32"


@pytest.mark.parametrize(
    ("flags", "limit", "bfloat16", "int8"),
    [
        ("avx2 avx512f avx512_vnni avx512_bf16", "", True, True),
        ("avx2 avx512f avx512_vnni avx512_bf16", "avx512_core_vnni", False, True),
        ("avx2 avx512f avx512_vnni avx512_bf16", "no such name", True, True),
        ("avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8", "AVX2", False, False),
        ("avx2 avx512f avx512_vnni", "", False, True),  # Cascade Lake
        ("avx2 avx_vnni avx_ne_convert", "", False, True),  # laptops
        ("avx2", "", False, False),
        ("asimd asimddp bf16 i8mm", "AVX2", True, True),  # the limit means nothing on ARM
        ("", "", False, False),  # macOS has no /proc/cpuinfo
    ],
)
def test_instructions_decide_and_not_the_speed_of_the_moment(
    flags: str, limit: str, bfloat16: bool, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_speed, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert cpu_speed._has_instructions(torch.bfloat16) == bfloat16
    assert cpu_speed._has_instructions(torch.int8) == int8
