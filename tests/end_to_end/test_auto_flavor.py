"""`model.flavor = "auto"`: a published model of sizes that no flavor has, such as SmolLM."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CHECKPOINTS, SMALL, into, losses, python, tensors_of, train_here

from torchtitan.errors import UserError
from torchtitan.tools.interchange.convert import open_checkpoint

FLAGS = (*SMALL, *CHECKPOINTS, "--model.flavor=auto")
# SmolLM-135M's proportions: three key-value heads for nine heads, tied embeddings.
SIZES: dict[str, Any] = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3,
         "intermediate_size": 192, "num_hidden_layers": 3,
         "vocab_size": 4096, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.full
def test_it_trains_resumes_and_goes_back(hub: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    copied, run = shutil.copytree(hub, tmp_path / "hub"), tmp_path / "run"
    path = f"--checkpoint.initial_load_path={copied}"
    train_here(*FLAGS, into(run), path, "--training.steps=2", "--checkpoint.last_save_in_hf")
    assert tensors_of(run, 2)["tok_embeddings.weight"].shape == (4096, 144)
    shutil.rmtree(copied)  # the run has sizes of its own now
    train_here(*FLAGS, into(run), path, "--training.steps=3")
    assert sorted(losses(run)) == [1, 2, 3]
    AutoModelForCausalLM.from_pretrained(run / "checkpoint" / "step-2-hf")
    done = python("-m", "torchtitan.tools.generate", "--checkpoint", run, "--prompt=a", "--max-new-tokens=2")
    assert done.returncode == 0, done.stderr
    # Of a checkpoint, too.
    train_here(*FLAGS, into(tmp_path / "other"), f"--checkpoint.initial_load_path={run / 'checkpoint' / 'step-3'}",
               "--training.steps=1")  # fmt: skip


@pytest.mark.full
def test_an_export_is_for_sequences_as_long_as_the_source_s(hub: Path, tmp_path: Path) -> None:
    """After a continuation on shorter ones, also of a resumed run, and of a run that starts from its checkpoint."""
    assert json.loads((hub / "config.json").read_text())["max_position_embeddings"] == 2048

    def longest(run: Path, step: int) -> int:
        config = json.loads((run / "checkpoint" / f"step-{step}-hf" / "config.json").read_text())
        return int(config["max_position_embeddings"])

    for run, start in ((tmp_path / "run", hub), (tmp_path / "next", tmp_path / "run" / "checkpoint" / "step-2")):
        flags = (*FLAGS, into(run), f"--checkpoint.initial_load_path={start}", "--checkpoint.last_save_in_hf")
        train_here(*flags, "--training.steps=1")
        assert longest(run, 1) == 2048
        train_here(*flags, "--training.steps=2")
        assert longest(run, 2) == 2048
    assert open_checkpoint(tmp_path / "next" / "checkpoint" / "step-2").seq_len == 2048


def test_the_scripts_take_it(hub: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Path(__file__).parents[2] / "torchtitan/data/assets"
    done = python("-m", "torchtitan.tools.convert", "from-hf", hub, tmp_path, "--tokenizer-path", tokenizer)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "step-0" / "manifest.json").read_text())
    assert manifest["configuration"]["model"]["flavor"] == "auto"
    done = python("-m", "torchtitan.tools.convert", "to-hf", tmp_path, tmp_path / "back", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    original, exported = (
        AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (hub, tmp_path / "back")
    )
    assert all(torch.equal(original[name], exported[name]) for name in original)
    done = python("-m", "torchtitan.tools.explain", *FLAGS, into(tmp_path), f"--checkpoint.initial_load_path={hub}",
                  "--model.converters=int8")  # fmt: skip
    assert done.returncode == 0 and "21 of 21 linear layers converted" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.flavor=auto",), "takes the sizes of the model in checkpoint.initial_load_path, which is not set"),
        (("--model.flavor=auto", "--checkpoint.initial_load_path=/nowhere"), "/nowhere does not exist"),
        (("--model.flavor=auto", "--model.name=qwen3", "{hub}"), "config.json: model_type is 'llama', not 'qwen3'"),
        (("--model.flavor=auto", "--checkpoint.initial_load_path=docs"), "holds neither a checkpoint nor config.json"),
        (("--model.flavor=smol",), "and auto, which takes the sizes of the model in checkpoint.initial_load_path"),
        (("--model.flavor=debugmodel", "{hub}"), "or model.flavor = auto"),
    ],
)
def test_sizes_that_are_nowhere(flags: tuple[str, ...], words: str, hub: Path, tmp_path: Path) -> None:
    path = f"--checkpoint.initial_load_path={hub}"
    with pytest.raises(UserError, match=re.escape(words)):
        train_here(*SMALL, into(tmp_path), *(flag.format(hub=path) for flag in flags), "--training.steps=1")
