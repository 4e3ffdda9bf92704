"""Every file in train_configs loads, and is valid for the number of GPUs that it states."""

import re
from pathlib import Path

import pytest

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.models import MODELS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "train_configs").glob("*.toml"))


def runs_anywhere(file: Path) -> bool:
    """The debug models run on a single device of any kind, and files for a CPU."""
    return file.stem.startswith("debug_") or file.stem.endswith("_cpu")


def gpus(file: Path) -> int:
    """From the comment `# GPUs: N`."""
    match = re.search(r"^# GPUs: (\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert match or runs_anywhere(file), f"{file.name} does not say how many GPUs it is for"
    return int(match[1]) if match else 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_loads_and_passes_the_checks(file: Path, tmp_path: Path) -> None:
    config = ConfigManager().parse_args([f"--job.config_file={file}", f"--job.dump_folder={tmp_path}"])
    dims = check(config, gpus(file), "cuda")
    assert dims.pp * dims.dp * dims.cp * dims.tp == gpus(file)
    # The comment next to global_batch_size, in millions of tokens.
    match = re.search(r"global_batch_size = \d+  # ([\d.]+)M tokens", file.read_text(encoding="utf-8"))
    if match:
        tokens = config.training.sequences_per_step(dims.dp) * config.training.seq_len
        assert tokens / 1e6 == pytest.approx(float(match[1]), abs=0.06)


REAL = [file for file in FILES if not runs_anywhere(file)]


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_real_models_have_their_own_folder_tokenizer_and_length(file: Path) -> None:
    config = ConfigManager().parse_args([f"--job.config_file={file}"])
    # Two models in one dump folder are refused, so each file has a separate one.
    assert Path(config.job.dump_folder).name == file.stem
    assert config.model.tokenizer_path is not None
    # The comment says to download the tokenizer to the path in the key.
    assert f"--local-dir {config.model.tokenizer_path.removeprefix('./')}\n" in file.read_text(encoding="utf-8")
    # The steps are about 20 tokens per parameter, as the comment says; the flavor's name is its billions of parameters,
    # and of the parameters that a token uses.
    args = MODELS.get(config.model.name).flavor(config.model.flavor)
    assert args.vocab_size is not None
    billions = float(re.split("-A", config.model.flavor)[-1].removesuffix("B"))
    tokens = config.training.steps * config.training.global_batch_size * config.training.seq_len
    assert 19 < tokens / (billions * 1e9) < 26
    assert config.checkpoint.enable_checkpoint
