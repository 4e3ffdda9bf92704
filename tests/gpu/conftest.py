"""`place`: each test runs on a GPU with the marker `gpu`, and as a rehearsal on the CPU without it."""

import os

import pytest
import torch
from place import Place


@pytest.fixture(
    scope="session", params=[pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return Place(request.param, tmp_path_factory.mktemp(request.param), shared / f"reference of {request.param}")


@pytest.fixture(autouse=True)
def rehearsal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides GPUs from a rehearsal."""
    if "place" in request.fixturenames and request.getfixturevalue("place").device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
