"""Hooks: the example of docs/extension.md, with its state and under other layouts; and hooks with errors."""

import re
from pathlib import Path
from typing import Any

import pytest
from runs import CHECKPOINTS, SMALL, failure, into, lines_of, train

from torchtitan.errors import CheckpointError
from torchtitan.protocols import Hook
from torchtitan.run.resume import load_states

ROOT = Path(__file__).parents[2]
MODEL = (*SMALL, "--model.name=tiny", "--model.flavor=narrow", "--optimizer.lr=1e-30")  # all losses are equal


@pytest.mark.full
def test_the_example_of_the_doc_resumes_under_every_layout(tmp_path: Path) -> None:
    example = (ROOT / "docs" / "examples" / "my_hook.py").read_text()
    (tmp_path / "mine.py").write_text(f"{example}\n\nimport tiny\n")
    run = tmp_path / "run"
    flags = (*MODEL, *CHECKPOINTS, "--validation.enabled", "--validation.freq=2", "--validation.steps=1", into(run))
    mine = (*flags, "--experimental.custom_import=mine")
    log = train(*mine, "--training.steps=4", folder=tmp_path)
    assert re.search(
        r"step 4 \| plateau/weight_norm [\d.]+\n.*step 4 \| validation loss .*\n.*plateau/lr_factor 0.5", log
    )
    train(*mine, "--training.steps=6", "--parallelism.tensor_parallel_degree=2", processes=2, folder=tmp_path)
    log = train(*flags, "--experimental.custom_import=tiny", "--training.steps=8", folder=tmp_path)
    assert "hooks of the checkpoint that this run lacks: plateau; it keeps their state" in log
    train(*mine, "--training.steps=9", "--parallelism.pipeline_parallel_degree=2", processes=2, folder=tmp_path)
    lines = lines_of(run / "metrics.jsonl")
    factors = [line["lr"] * 1e30 for line in lines if "lr" in line]
    assert factors == pytest.approx([0.5, 1, 1, 1, 0.5, 0.5, 1, 1, 0.25])
    assert [line["plateau/lr_factor"] for line in lines if "plateau/lr_factor" in line] == [1, 0.5, 0.25, 0.125]
    norms = {line["step"]: line["plateau/weight_norm"] for line in lines if "plateau/weight_norm" in line}
    assert list(norms) == [1, 2, 3, 4, 5, 6, 9]
    assert list(norms.values()) == pytest.approx([norms[1]] * 7, rel=1e-6)


BROKEN = """
import tiny, torch.distributed as dist
from torchtitan.errors import DataError
from torchtitan.protocols import Hook
from torchtitan.run.hooks import HOOKS

class Broken(Hook):
    def after_step(self, run):
        if run.step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            {}

HOOKS.register("broken", Broken)
"""


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("1 / 0", 1, "RuntimeError: after_step of the hook 'broken' failed: ZeroDivisionError('division by zero')"),
        ("return {'x': 'y'}", 1, "after_step of the hook 'broken' failed: ValueError("),
        ("self.lr_factor = 'half'", 1, "lr_factor of the hook 'broken' failed: ValueError("),
        ("self.lr_factor = float('nan')", 2, "Error: hooks broken: lr_factor must be a finite number of at least 0."),
        ("raise DataError('no probes')", 2, "Error: no probes\n"),
    ],
)
def test_an_error_ends_the_run_and_names_the_hook(
    code: str, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    ended, output = failure(
        *MODEL, "--experimental.custom_import=broken", "--training.steps=3", into(tmp_path), processes=1
    )
    assert ended == status and message in output
    assert ("Traceback" in output) == (status == 1)


@pytest.mark.full
def test_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format("1 / 0"))
    flags = (*MODEL, "--experimental.custom_import=broken", "--training.steps=1000", into(tmp_path / "run"))
    status, output = failure(*flags, processes=2, folder=tmp_path)
    assert status == 1
    assert "[rank 1] RuntimeError: after_step of the hook 'broken' failed: ZeroDivisionError" in output


@pytest.mark.parametrize(
    "state", [3, {"lr_factor": 1.0}, {"lr_factor": "1", "state": {}}, {"lr_factor": 1.0, "state": []}]
)
def test_an_invalid_state_is_refused(state: object) -> None:
    with pytest.raises(CheckpointError, match=r"train_state\.json .* has an invalid value"):
        load_states({"mine": Hook()}, {"mine": state})


def test_an_error_in_a_hook_is_no_damage_of_the_checkpoint() -> None:
    class Forgetful(Hook):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            state["something else"]

    with pytest.raises(RuntimeError, match="load_state_dict of the hook 'mine' failed: KeyError"):
        load_states({"mine": Forgetful()}, {"mine": {"lr_factor": 1.0, "state": {}}})
