"""Passwords and tokens of a run's configuration are in nothing that it prints, writes or sends."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from runs import CHECKPOINTS, HELPERS, ROOT, SMALL, into, lines_of, started

SECRET = "geheim"
MODULE = """
import tiny
from dataclasses import dataclass, field
from torchtitan.data.datasets import DATASETS
from torchtitan.data.paths import open_path

DATASETS.register("mine", lambda path, column: open_path("data", column))

@dataclass(frozen=True)
class Store:
    \"\"\"Where it is.\"\"\"
    api_token: str = ""
    address: str = ""

@dataclass(frozen=True)
class JobConfig:
    store: Store = field(default_factory=Store)
"""


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("trackers", ["", pytest.param("wandb,mlflow,trackio", marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_no_secret_is_printed_written_or_sent(trackers: str, tmp_path: Path) -> None:
    folder, uri = tmp_path / "run", f"https://me:{SECRET}@host/data?x=1&token={SECRET}"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.jsonl").write_text("".join(f'{{"text": "Once {"upon " * 50}{n}"}}\n' for n in range(99)))
    (tmp_path / "secret.py").write_text(MODULE)
    flags = (
        *(*SMALL, *CHECKPOINTS, "--model.name=tiny", "--model.flavor=narrow", into(folder), "--job.print_args"),
        *("--experimental.custom_import=secret", "--experimental.custom_args_module=secret"),
        *(f"--store.api_token={SECRET}", f"--store.address=ftp://{SECRET}@host", f"--job.description=data of {uri}"),
        *("--training.dataset=mine", "--training.max_norm=inf", "--metrics.report", f"--metrics.trackers={trackers}"),
    )
    variables = {
        "WANDB_MODE": "offline",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS), str(tmp_path)]),
    }
    for steps, path in ((2, uri), (4, f"{uri}&y=2")):
        last = (f"--training.steps={steps}", f"--training.dataset_path={path}")
        options = variables if trackers else {}
        with started(*flags, *last, processes=None, folder=tmp_path, fresh=bool(trackers), **options) as run:
            status, output = run.finish()
        assert status == 0 and SECRET not in output, output
        assert "https://***@host/data?x=1&token=***" in output and 'api_token = "***"' in output
    found = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not found
    assert "https://***@host" in (folder / "config.toml").read_text()
    assert "https://***@host" in (folder / "report.html").read_text()
    changed = [event["changed"] for event in lines_of(folder / "events.jsonl") if "changed" in event]
    assert changed == [{"training.steps": ["2", "4"], "training.dataset_path": [
        "https://***@host/data?x=1&token=***", "https://***@host/data?x=1&token=***&y=2"
    ]}]  # fmt: skip
    # What JSON cannot say is a text in it: every program may read these files.
    manifest = strictly((folder / "checkpoint" / "step-4" / "manifest.json").read_text())
    assert manifest["configuration"]["training"]["max_norm"] == "Infinity"
    if trackers:
        (config,) = folder.glob("mlartifacts/*/artifacts/config.json")
        assert strictly(config.read_text())["training"]["max_norm"] == "Infinity"
    # The file asks for what it lacks.
    own = (f"--job.config_file={folder / 'config.toml'}", "--experimental.custom_args_module=secret")
    with started(*own, processes=None, folder=tmp_path) as run:
        status, output = run.finish()
    assert status == 2 and output.count("has lost its password or token (***): set it again") == 4, output
    assert "training.dataset_path = https://***@host" in output and "store.api_token = ***" in output
