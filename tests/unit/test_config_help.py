"""`--help`: every key with its help, type and default, without importing torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.fields import fields_by_key


def help_text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        ConfigManager().parse_args([*argv, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_every_key_is_listed_with_help_type_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys)
    # Keys without a flag are listed as they are written in a file.
    listed = dict(re.findall(r"^  (?:--|\[\[)([\w.]+)(?:\]\])?\n      (.*)$", text, re.MULTILINE))
    assert "    until_step\n      Last step of the phase" in text
    assert list(listed) == [key.removesuffix(".entries") for key in fields_by_key(JobConfig)]
    for key, line in listed.items():
        assert re.fullmatch(r"\S.{10,} \(.+; default .+\)", line), f"{key}: {line}"
    assert listed["training.steps"] == "Number of optimizer steps. (an integer above 0; default 10000)"
    assert listed["metrics.enable_tensorboard"].endswith("(true or false; default false)")
    assert listed["mx.filter_fqns"].endswith("(a list of strings; default output)")
    assert listed["model.tokenizer_path"].endswith("(a path, or a URI such as s3://bucket/name, or none; default none)")
    assert listed["lr_scheduler.decay_type"].endswith("(one of linear, sqrt, cosine, power; default linear)")
    assert set(re.findall(r"^\[(\w+)\]  \S", text, re.MULTILINE)) == {key.split(".")[0] for key in listed}


def test_help_works_beside_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--training.steps" in help_text(capsys, "--training.steps=x")


def test_configuration_imports_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from torchtitan.config import ConfigManager, to_toml
import torchtitan.errors, torchtitan.logging, torchtitan.registry
to_toml(ConfigManager().parse_args(["--training.steps=3"]))
try:
    ConfigManager().parse_args(["--help"])
finally:
    heavy = {"torch", "torchao", "numpy", "datasets"} & set(sys.modules)
    assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
