"""training.mixed_precision_param = auto."""

import time
from itertools import count
from pathlib import Path

import pytest

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.engine import compute_dtype
from torchtitan.engine.compute_dtype import decide_compute_dtype
from torchtitan.kernels.cpu_speed import _is_faster


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


def test_a_few_interrupted_gemms_decide_nothing() -> None:
    """As on a busy machine, where each may lose the core for several milliseconds."""
    calls = count(1)
    slow = 0.005

    def often_interrupted() -> None:
        time.sleep(slow if next(calls) % 4 else 0)

    assert _is_faster(often_interrupted, than=lambda: time.sleep(0.001))
    assert not _is_faster(lambda: time.sleep(slow), than=lambda: time.sleep(0.001))
