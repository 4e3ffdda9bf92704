"""A user's own module adds sections and keys: `experimental.custom_args_module`."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.errors import ConfigError

EXAMPLE = '''
"""Two keys of my own and a new default."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt
from typing_extensions import Doc


@dataclass
class Distillation:
    """Learn from a larger model."""

    teacher: Annotated[str | None, Doc("Checkpoint of the teacher.")] = None
    temperature: Annotated[float, Gt(0), Doc("Softens the teacher's distribution.")] = 1.0
    layers: list[int] = field(default_factory=lambda: [3, 5])
    loss: Literal["kl", "mse"] = "kl"
    cache: bool = False


@dataclass
class Training:
    z_loss: Annotated[float, Doc("Weight of the z-loss.")] = 1e-4
    seq_len: int = 512


@dataclass
class JobConfig:
    distillation: Distillation = field(default_factory=Distillation)
    training: Training = field(default_factory=Training)
'''


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The flag that names the example module in the working directory."""
    name = f"my_args_{tmp_path.name}".replace("-", "_")  # a module is imported once per process
    (tmp_path / f"{name}.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"--experimental.custom_args_module={name}"


def test_own_section_and_own_key_in_ours(flag: str) -> None:
    config = ConfigManager().parse_args(
        [flag, "--distillation.temperature=2", "--training.z_loss=0", "--distillation.cache"]
    )
    assert isinstance(config, JobConfig)
    sections: Any = config
    distillation, training = sections.distillation, sections.training
    assert (distillation.temperature, distillation.teacher, distillation.cache) == (2.0, None, True)
    assert distillation.layers == [3, 5]
    assert (training.z_loss, training.steps) == (0.0, 10000)
    assert training.seq_len == 512  # the user's default wins
    with pytest.raises(dataclasses.FrozenInstanceError):
        distillation.cache = False
    assert ConfigManager().parse_args([flag, "--distillation.layers=1,2"]).distillation.layers == [1, 2]  # type: ignore[attr-defined]
    assert not hasattr(ConfigManager().parse_args([]), "distillation")


def test_module_named_in_the_file(flag: str, tmp_path: Path) -> None:
    module = flag.split("=")[1]
    text = f"[experimental]\ncustom_args_module = '{module}'\n[distillation]\nteacher = 'big'\n"
    (tmp_path / "run.toml").write_text(text)
    config = ConfigManager().parse_args(["--job.config_file=run.toml"])
    assert config.distillation.teacher == "big"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"unknown section \[distillation\]"):
        ConfigManager().parse_args(["--job.config_file=run.toml", "--experimental.custom_args_module="])


def test_own_keys_are_checked(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args(
            [flag, "--distillation.temperature=0", "--distillation.loss=l1", "--distillation.techer=x"]
        )
    assert caught.value.problems == (
        "Command line: unknown flag --distillation.techer (did you mean distillation.teacher?).",
        "--distillation.temperature must be a number above 0, not '0'.",
        "--distillation.loss must be one of kl, mse, not 'l1'.",
    )


def test_own_keys_in_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ConfigManager().parse_args([flag, "--help"])
    text = capsys.readouterr().out
    assert "[distillation]  Learn from a larger model." in text
    assert "--distillation.teacher\n      Checkpoint of the teacher. (a string, or none; default none)" in text
    assert "default 3,5)" in text
    assert "--training.z_loss" in text


def test_resolved_configuration_with_own_section_loads_again(flag: str, tmp_path: Path) -> None:
    config = ConfigManager().parse_args([flag, "--distillation.teacher=big", "--distillation.layers=7"])
    (tmp_path / "config.toml").write_text(to_toml(config))
    again = ConfigManager().parse_args(["--job.config_file=config.toml"])
    assert dataclasses.asdict(again) == {
        **dataclasses.asdict(config),
        "job": {**dataclasses.asdict(config.job), "config_file": "config.toml"},
    }


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("no_such_module", None, "no module 'no_such_module' in the working directory or on PYTHONPATH"),
        (".relative", None, "no module '.relative' in the working directory or on PYTHONPATH"),
        ("ext_empty", "", "ext_empty has no dataclass named JobConfig; add one."),
        ("ext_plain", "class JobConfig: ...", "ext_plain has no dataclass named JobConfig; add one."),
        (
            "ext_scalar",
            "from dataclasses import dataclass\n@dataclass\nclass JobConfig:\n    steps: int = 3",
            "section steps of ext_scalar.JobConfig is not a dataclass; make it one.",
        ),
        (
            "ext_no_default",
            "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: int\n"
            "@dataclass\nclass JobConfig:\n    mine: Mine",
            "Mine.x needs a default.",
        ),
    ],
)
def test_module_that_cannot_be_used(
    name: str, code: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code is not None:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args([f"--experimental.custom_args_module={name}"])
    assert str(caught.value).startswith("experimental.custom_args_module: ") and message in str(caught.value)


def test_an_import_that_fails_inside_the_users_module_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ext_broken.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        ConfigManager().parse_args(["--experimental.custom_args_module=ext_broken"])
