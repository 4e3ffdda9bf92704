"""A user's mistake gives one sentence that names the key and the remedy, exit status 2, and no traceback."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, TINY, checkpoint_steps, failure, into, last_step, python, train_here

from torchtitan.device import Device
from torchtitan.errors import UserError
from torchtitan.run.trainer import Trainer


def assert_message(status: int, output: str, *fragments: str) -> None:
    assert status == 2, output
    assert "Traceback" not in output
    assert "Error: " in output
    for fragment in fragments:
        assert fragment in output


# As typed by a user


def test_a_schedule_that_no_program_wrote(tmp_path: Path) -> None:
    """What reads it raises an error of its own for a cell as long as this."""
    (tmp_path / "schedule.csv").write_text(f"0F0,{'x' * 200_000}\n1F0\n")
    flags = (*TINY, "--parallelism.pipeline_parallel_degree=2", into(tmp_path / "run"))
    named = "--parallelism.pipeline_parallel_schedule=PipelineScheduleMulti"
    csv = f"--parallelism.pipeline_parallel_schedule_csv={tmp_path}/schedule.csv"
    assert_message(*failure(*flags, named, csv, processes=2), "pipeline_parallel_schedule_csv", "one line per rank")


def test_there_is_no_such_config_file() -> None:
    assert_message(*failure("--job.config_file=none_such.toml", processes=None), "job.config_file", "none_such.toml")


def test_the_config_file_is_malformed(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[training]\nsteps = = 3\n")
    assert_message(*failure(f"--job.config_file={file}", processes=None), "bad.toml", "line 2")


def test_mistakes_in_the_config_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[training]\nsequence_len = 64\nsteps = "many"\n[optimiser]\nlr = 1.0\n')
    status, output = failure(f"--job.config_file={file}", "--training.seq_len=-1", processes=None)
    assert_message(
        status,
        output,
        "unknown key training.sequence_len (did you mean training.seq_len?)",
        "training.steps must be an integer above 0, not 'many'",
        "unknown section [optimiser] (did you mean optimizer?)",
        "--training.seq_len must be an integer above 0, not '-1'",
    )


def test_mistakes_between_keys_are_reported_at_once_and_by_one_rank(tmp_path: Path) -> None:
    flags = ("--model.name=lama3", "--training.global_batch_size=7", into(tmp_path))
    status, output = failure(*flags, processes=2)
    assert_message(status, output)
    assert output.count("model.name: unknown model 'lama3' (did you mean llama3?); known: afmoe, ") == 1
    assert output.count("training.global_batch_size = 7 is not a multiple") == 1
    assert len(output.strip().splitlines()) == 2


@pytest.mark.full
def test_more_processes_than_rows(tmp_path: Path) -> None:
    status, output = failure(*SMALL, "--training.global_batch_size=1", into(tmp_path), processes=2)
    assert_message(
        status, output, "training.global_batch_size = 1 is smaller than the number of data-parallel ranks, 2"
    )


@pytest.mark.full
def test_a_mistake_in_the_data_ends_all_ranks(tmp_path: Path) -> None:
    flags = (f"--training.dataset_path={tmp_path}/none_such.jsonl", into(tmp_path / "run"))
    status, output = failure(*SMALL, *flags, processes=2)
    assert_message(status, output, "training.dataset_path", "none_such.jsonl")


def test_the_dump_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_message(*failure(into(tmp_path / "file"), processes=None), "job.dump_folder", str(tmp_path / "file"))


@pytest.mark.full
@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_processes_that_is_none(number: str) -> None:
    status, output = failure(processes=1, NGPU=number)
    assert_message(status, output, "NGPU", repr(number))


RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x is no number"),
        *(({"RANK": value}, f"RANK={value} is no number") for value in ("", "-1", "1.0", "two")),
        *(
            ({name: value for name, value in RANKS.items() if name != missing}, f"RANK=0 is set, but {missing} is not")
            for missing in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        ),
        *(
            ({**RANKS, name: value}, message)
            for name, value, message in (
                ("MASTER_PORT", "abc", "MASTER_PORT=abc is no number"),
                ("MASTER_PORT", "70000", "MASTER_PORT=70000 is no port"),
                ("MASTER_ADDR", "", "RANK=0 is set, but MASTER_ADDR is not"),
                ("WORLD_SIZE", "0", "RANK=0 is not below WORLD_SIZE=0"),
                ("RANK", "3", "RANK=3 is not below WORLD_SIZE=2"),
                ("LOCAL_RANK", "1", "LOCAL_RANK=1 is above RANK=0"),
                ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE=3 is not between 1 and WORLD_SIZE=2"),
            )
        ),
        (
            {**RANKS, "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=1",
        ),
    ],
)
def test_variables_that_give_a_process_no_place(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    for program in (("train.py", *TINY, into(tmp_path)), ("-m", "torchtitan.tools.check_layout", *TINY)):
        if "RANK" in variables or program[0] == "train.py":  # else it starts the ranks itself
            done = python(*program, **variables)
            assert_message(done.returncode, done.stdout + done.stderr, message, "unset RANK, WORLD_SIZE and LOCAL_RANK")


def test_rank_0_has_no_machine(tmp_path: Path) -> None:
    flags = (*TINY, into(tmp_path), "--comm.init_timeout_seconds=1")
    done = python("train.py", *flags, **{**RANKS, "MASTER_ADDR": "no such.machine"})
    assert_message(done.returncode, done.stdout + done.stderr, "MASTER_ADDR=no such.machine is the name of no machine")


@pytest.mark.full
def test_another_program_uses_the_port_of_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert_message(*failure(*TINY, into(tmp_path), processes=None, **world), f"MASTER_PORT={port} is in use")


def test_a_users_module_that_is_not_there(tmp_path: Path) -> None:
    flags = ("--experimental.custom_import=none_such", into(tmp_path))
    assert_message(*failure(*flags, processes=None), "experimental.custom_import", "none_such")


# Without starting a process for each


def problem(*flags: str) -> str:
    with pytest.raises(UserError) as caught:
        train_here(*TINY, *flags)
    return str(caught.value)


@pytest.mark.parametrize("key", ["steps", "seq_len", "local_batch_size"])
@pytest.mark.parametrize("value", ["0", "-4", "1.5", "few"])
def test_a_size_that_is_none(key: str, value: str, tmp_path: Path) -> None:
    text = problem(f"--training.{key}={value}", into(tmp_path))
    assert f"--training.{key} must be an integer above 0, not '{value}'" in text


def test_the_tokenizer_is_missing(tmp_path: Path) -> None:
    text = problem(f"--model.tokenizer_path={tmp_path}/none_such", into(tmp_path))
    assert "model.tokenizer_path" in text
    assert "none_such" in text


@pytest.mark.parametrize("content", [b"", b"just text\n", b'{"not": "a tokenizer"}', b"\x00\x01\x02"])
def test_the_tokenizer_is_of_another_kind(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    text = problem(f"--model.tokenizer_path={file}", into(tmp_path))
    assert "model.tokenizer_path" in text
    assert "tokenizer.model" in text


def test_the_vocabulary_of_the_model_is_too_small(tmp_path: Path) -> None:
    text = problem("--model.flavor=few_words", into(tmp_path))
    assert "model.tokenizer_path: the tokenizer has 4096 tokens" in text
    assert "tiny few_words has a vocabulary of 100" in text


LINE = json.dumps({"text": "some words to train on", "url": "u"}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", None, "there is no file or folder"),
        ("data.jsonl", b"", "is empty"),
        ("data.jsonl", LINE.replace(b'"text"', b'"content"') * 1000, "training.text_column"),
        ("data.txt", b"caf\xe9\n" * 10_000, "is not UTF-8 text"),
        ("data.jsonl", LINE * 3, "has 3 documents for the 4 rows"),
        ("data.jsonl", LINE * 8, "fewer than one sequence"),
        ("data.txt", b"a line\n" * 30, "has 1 document for the 4 rows"),
        ("data.parquet", b"no parquet", "is not a Parquet file"),
        ("data.jsonl", b"no json\n" * 100, "is not JSONL"),
    ],
    ids=["missing", "empty", "no column", "not UTF-8", "few", "short", "short text", "not Parquet", "not JSONL"],
)
def test_data_that_cannot_be_used(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    text = problem(f"--training.dataset_path={file}", into(tmp_path / "run"))
    assert message in text
    assert name in text


def test_a_validation_set_that_is_not_there(tmp_path: Path) -> None:
    text = problem("--validation.enabled", f"--validation.dataset_path={tmp_path}/none_such.txt", into(tmp_path))
    assert "validation.dataset_path" in text


def test_a_vocabulary_that_is_too_small_is_found_before_a_large_model_is_made(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    pieces = {"<s>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(40_000)}}
    tokenizer.write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": pieces, "unk_token": "<s>"}})
    )
    text = problem("--model.name=llama2", "--model.flavor=7B", f"--model.tokenizer_path={tokenizer}", into(tmp_path))
    assert "40002 tokens, but llama2 7B has a vocabulary of 32000" in text


def shortened_before_step_3(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents, most of which are cut off while a run in this process trains."""
    data.write_text("".join(json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(200)))
    train_step = Trainer.train_step

    def shortening(trainer: Trainer, *arguments: Any) -> None:
        if trainer.step == 3:
            os.truncate(data, 50)
        train_step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "train_step", shortening)
    return data


def test_data_that_are_shortened_cost_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shortened_before_step_3(tmp_path / "data.jsonl", monkeypatch)
    saving = ("--checkpoint.enable_checkpoint", "--checkpoint.interval=100", "--training.steps=1000")
    with pytest.raises(UserError, match=r"data\.jsonl was changed while the run is reading it"):
        train_here(*TINY, *saving, f"--training.dataset_path={data}", into(tmp_path / "run"))
    assert checkpoint_steps(tmp_path / "run") == [last_step(tmp_path / "run")]


def test_too_little_to_validate_with_is_found_before_the_first_step(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({"text": "value " * 200}) + "\n") * 500)
    with pytest.raises(UserError, match=r"has 5 documents for the 8 rows .* validation\.local_batch_size"):
        train_here(*TINY, "--validation.enabled", f"--training.dataset_path={data}", into(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("steps", [1000, 3], ids=["on the way", "after the last step"])
def test_validation_data_that_are_shortened_cost_no_step(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shortened_before_step_3(tmp_path / "data.jsonl", monkeypatch)
    saving = ("--checkpoint.enable_checkpoint", "--checkpoint.interval=100", f"--training.steps={steps}")
    validating = ("--validation.enabled", "--validation.freq=3", f"--validation.dataset_path={data}")
    with pytest.raises(UserError, match=r"data\.jsonl was changed while the run is reading it"):
        train_here(*TINY, *saving, *validating, into(tmp_path / "run"))
    assert checkpoint_steps(tmp_path / "run") == [3]


def test_a_model_that_cannot_fit_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "memory_capacity_bytes", lambda device: 2**20)  # a machine with 1 MiB
    with pytest.raises(UserError, match=r"^model\.flavor = narrow: .* need 0 GiB on one machine, which has 0 GiB; use"):
        train_here(*TINY, into(tmp_path))
