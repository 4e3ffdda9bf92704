"""The tokenizer that weights were made with stays with them, wherever they go."""

import argparse
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from runs import TINY, failure, into, losses, python, train, train_here

from torchtitan.checkpoint.manifest import read_manifest, write_json, write_manifest
from torchtitan.data import load_tokenizer
from torchtitan.tools.branch import make_branch
from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

RUN = (*TINY, "--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--training.steps=2")


def tokenizer(folder: Path, module: Any) -> Path:
    """A folder with a sentencepiece model of 400 pieces, trained on a module's source."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(module.__file__).read_text().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "chat_template": "{{ x }}"}')
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and the tokenizers `own`, which is its own, and `other`. The path that the
    run was given is gone."""
    folder = tmp_path_factory.mktemp("tokenizers")
    own = tokenizer(folder / "own", json.decoder)
    tokenizer(folder / "other", argparse)
    shutil.copytree(own, folder / "gone")
    train_here(*RUN, into(folder / "run"), f"--model.tokenizer_path={folder / 'gone'}", "--checkpoint.last_save_in_hf")
    shutil.rmtree(folder / "gone")
    return folder


def script(name: str, *arguments: object) -> tuple[int, str]:
    done = python(*name.split(), *arguments, "--custom-import", "tiny")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_what_is_exported_is_the_tokenizer_of_the_weights(run: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer(tmp_path / "moved" / "gone", argparse)  # another one, under the name that the run had
    shutil.copytree(run / "run", tmp_path / "moved" / "run")
    status, output = script("-m torchtitan.tools.convert to-hf", tmp_path / "moved" / "run", tmp_path / "out")
    assert status == 0, output
    ours = load_tokenizer(str(run / "own"))
    for folder in (tmp_path / "out", run / "run" / "checkpoint" / "step-2-hf"):
        loaded = AutoTokenizer.from_pretrained(folder)
        assert loaded("def decode(self): return")["input_ids"] == ours.encode("def decode(self): return")  # and no BOS
        assert loaded.chat_template == "{{ x }}"
        assert json.loads((folder / "config.json").read_text())["bos_token_id"] is None
    shutil.rmtree(tmp_path / "moved" / "run" / "tokenizer_copy")
    shutil.copytree(tmp_path / "moved" / "gone", tmp_path / "moved" / "run" / "tokenizer_copy")
    checkpoint = tmp_path / "moved" / "run" / "checkpoint" / "step-2"
    shutil.move(run / "run" / "tokenizer_copy", run / "run" / "hidden")  # its dump folder is recorded, too
    try:
        status, output = script("-m torchtitan.tools.convert to-hf", checkpoint, tmp_path / "third")
        assert status == 2 and "is neither in a folder tokenizer_copy near it nor at" in output, output
        status, output = script(
            "-m torchtitan.tools.convert to-hf", checkpoint, tmp_path / "third", "--tokenizer-path", run / "own"
        )
        assert status == 0, output
    finally:
        shutil.move(run / "run" / "hidden", run / "run" / "tokenizer_copy")


@pytest.mark.full
@pytest.mark.parametrize(
    "command", ["-m torchtitan.tools.generate --prompt def --checkpoint", "-m torchtitan.tools.evaluate"]
)
def test_generation_and_evaluation_take_no_other(command: str, run: Path) -> None:
    tasks = ("--tasks", "stdlib_brackets", "--limit", "1") if "evaluate" in command else ("--max-new-tokens", "2")
    for folder in (run / "run", run / "run" / "checkpoint" / "step-2-hf"):
        status, output = script(command, folder, *tasks)
        assert status == 0, output
        status, output = script(command, folder, *tasks, "--tokenizer-path", run / "other")
        assert status == 2 and "--tokenizer-path: " in output and "another tokenizer" in output, output
        assert "Traceback" not in output


def refused(*flags: str) -> str:
    status, output = failure(*RUN, *flags)
    assert status == 2 and "Traceback" not in output, output
    return output


@pytest.mark.full
def test_a_run_goes_on_and_starts_only_with_the_same_tokenizer(run: Path, tmp_path: Path) -> None:
    """The same is also another file with its ids, at another place."""
    (tmp_path / "json").mkdir()
    for name, content in tokenizer_files(str(run / "own")).items():
        (tmp_path / "json" / name).write_bytes(content)
    (tmp_path / "json" / "tokenizer.model").unlink()
    shutil.copytree(run / "run", tmp_path / "run")
    more = (into(tmp_path / "run"), "--training.steps=3")
    output = refused(*more, f"--model.tokenizer_path={run / 'other'}", "--checkpoint.exclude_from_loading=dataloader")
    assert f"model.tokenizer_path: {tmp_path / 'run' / 'checkpoint' / 'step-2'} was made with another tok" in output
    assert f"set --model.tokenizer_path={tmp_path / 'run' / 'tokenizer_copy'}; or" in output
    output = refused(*more, f"--model.tokenizer_path={run / 'own'}", "--training.add_bos")
    assert "training.add_bos, training.add_eos or the files beside the tokenizer have changed: " in output
    output = refused(*more, f"--model.tokenizer_path={run / 'gone'}")
    assert f"The tokenizer of the run in {tmp_path / 'run'} is in {tmp_path / 'run' / 'tokenizer_copy'}." in output
    train_here(*RUN, *more, f"--model.tokenizer_path={tmp_path / 'json'}")
    assert 3 in losses(tmp_path / "run")
    for name in ("step-2", "step-2-hf"):
        start = f"--checkpoint.initial_load_path={run / 'run' / 'checkpoint' / name}"
        other = (into(tmp_path / f"other-{name}"), start, f"--model.tokenizer_path={run / 'other'}")
        assert "made with another tokenizer" in refused(*other)
        train_here(*RUN, *other, "--checkpoint.exclude_from_loading=tokenizer")  # on purpose


def test_checkpoints_of_earlier_versions_load_with_a_line(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint" / "step-2"
    manifest, path = read_manifest(checkpoint), checkpoint / "train_state.json"
    state = json.loads(path.read_text())
    del state["tokenizer"], state["dataloader"]["tokenizer_ids"]
    files = {**manifest.files, path.name: write_json(path, state)}
    write_manifest(checkpoint, {"step": 2, "configuration": manifest.configuration}, files)
    train_here(*RUN, into(tmp_path / "run"), "--training.steps=3", f"--model.tokenizer_path={run / 'own'}")
    other = f"--model.tokenizer_path={run / 'other'}"
    output = train(*RUN, into(tmp_path / "new"), other, f"--checkpoint.initial_load_path={checkpoint}")
    assert "was perhaps made with another tokenizer: its file had the hash" in output


@pytest.mark.full
def test_branches_and_averages_carry_it(run: Path, tmp_path: Path) -> None:
    step = run / "run" / "checkpoint" / "step-2"
    status, output = script("scripts/average_checkpoints.py", step, step, "--out", tmp_path / "mean")
    assert status == 0, output
    shutil.move(tmp_path / "mean", tmp_path / "elsewhere")
    status, output = script("-m torchtitan.tools.convert to-hf", tmp_path / "elsewhere", tmp_path / "out")
    assert status == 0, output
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (run / "own" / "tokenizer.model").read_bytes()
    module = "--experimental.custom_import=tiny"
    folder = make_branch(step, 1, tmp_path / "branch", [module]).parent
    train_here(f"--job.config_file={folder / 'branch.toml'}", module)
    assert 3 in losses(folder)
