"""How a process describes its device."""

import pytest

from torchtitan.device import find_device


@pytest.mark.parametrize(("name", "told"), [("AVX512_CORE", False), ("avx2", False), ("AVX512CORE", True)])
def test_an_unknown_instruction_set_is_told(
    name: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", name)
    find_device(0)
    assert ("knows no such name (did you mean AVX512_CORE?)" in caplog.text) == told
