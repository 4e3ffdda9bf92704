"""How a process describes its device."""

from pathlib import Path

import pytest
import torch

from torchtitan import device
from torchtitan.device import find_device
from torchtitan.errors import UserError
from torchtitan.hardware import SHARING
from torchtitan.launcher.processes import find_processes


@pytest.mark.parametrize(("name", "told"), [("AVX512_CORE", False), ("avx2", False), ("AVX512CORE", True)])
def test_an_unknown_instruction_set_is_told(
    name: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", name)
    find_device(0)
    assert ("knows no such name (did you mean AVX512_CORE?)" in caplog.text) == told


@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "is built without CUDA"), ("13.0", "The NVIDIA driver on your system is too old")]
)
def test_gpus_that_torch_cannot_use_stop_the_run(
    cuda: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight processes would train on the CPU without a word."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update.")

    monkeypatch.setattr(device, "NVIDIA_DEVICES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert find_device(0).type == "cpu"  # the driver is installed, but there is no GPU
    (tmp_path / "nvidia0").touch()
    with pytest.raises(UserError, match=f"{reason}.*CUDA_VISIBLE_DEVICES= "):
        find_device(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device(0).type == "cpu"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "5", "LOCAL_RANK": "5"}, "LOCAL_RANK=5, but this process sees 4 GPUs"),
        ({"RANK": "5"}, "RANK is set, but LOCAL_RANK, which"),
    ],
)
def test_each_rank_has_a_gpu(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(device, "_require_compiler", lambda: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        find_device(int(variables.get("LOCAL_RANK", 0)))


@pytest.mark.parametrize(("missing", "remedy"), [("compiler", "install gcc"), ("header", r"install python3\.\d+-dev")])
def test_a_gpu_without_a_compiler_is_refused_at_the_start(
    missing: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    if missing == "compiler":
        monkeypatch.setattr("shutil.which", lambda name: None)
    else:
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UserError, match=remedy):
        find_device(0)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU and nine processes, none of which touches it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(device, "_require_compiler", lambda: None)
    monkeypatch.setattr(device, "_end_expandable_segments_where_they_fail", lambda _: None)
    monkeypatch.delenv(SHARING, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")


@pytest.mark.usefixtures("one_gpu")
def test_ranks_share_a_gpu_only_where_nccl_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"LOCAL_RANK=8, but .* 1 GPU: .* {SHARING}=1"):
        find_device(8)
    monkeypatch.setenv("NGPU", "9")
    with pytest.raises(UserError, match=f"NGPU = 9, .* only 1 GPU; lower NGPU, or set {SHARING}=1"):
        find_processes()
    monkeypatch.setenv(SHARING, "1")
    monkeypatch.setattr(device, "_nccl_version", lambda: 23004)
    assert find_processes() == 9
    assert (find_device(8).torch_device, find_device(8).is_shared) == (torch.device("cuda", 0), True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not find_device(0).is_shared


@pytest.mark.usefixtures("one_gpu")
def test_an_nccl_that_lets_no_ranks_share_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 to 2.13 bring such a one along; it would fail with "Duplicate GPU detected"."""
    monkeypatch.setenv(SHARING, "1")
    monkeypatch.setattr(device, "_nccl_version", lambda: 22907)
    with pytest.raises(UserError, match=r"needs NCCL 2\.30 or later, but this torch has 2\.29; .* LD_PRELOAD"):
        find_device(0)
