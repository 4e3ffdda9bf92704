"""A process dies or stops: the others name it, and restart. Two launchers on loopback act as two machines."""

import os
import random
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from runs import (
    HELD,
    ROOT,
    SMALL,
    TINY,
    Run,
    checkpoint_steps,
    failure,
    hold,
    into,
    last_step,
    let_go,
    losses,
    started,
    train,
)

from torchtitan.checkpoint.manifest import damage

STEPS = 16
ONE_ROW = (*TINY, "--training.local_batch_size=1")
ENDLESS = (*ONE_ROW, "--training.steps=100000")
FLAGS = (*ONE_ROW, f"--training.steps={STEPS}", "--checkpoint.enable_checkpoint", "--checkpoint.interval=4")


@contextmanager
def two_nodes(
    *flags: str, restarts: int = 0, folder: Path = ROOT, second_only: Sequence[str] = ()
) -> Iterator[tuple[Run, Run]]:
    """The launchers of two machines with one process each.

    Args:
        second_only: flags of the second machine alone.
    """
    while True:
        port = random.randint(10_000, 30_000)  # no port that a connection elsewhere gets in the meantime
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            break
    options = ("--nnodes=2", f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    command = (sys.executable, "-m", "torchtitan.launch", *options, str(ROOT / "train.py"))
    with (
        started(*flags, command=command, folder=folder) as first,
        started(*flags, *second_only, command=command, folder=folder) as second,
    ):
        yield first, second


def wait_for_rank(nodes: tuple[Run, Run], rank: int) -> tuple[int, int]:
    """(index of the machine that the rendezvous assigned, process) of a rank."""
    nodes[0].wait_until(lambda: any(node.pid_of_rank(rank) for node in nodes))
    return next((index, pid) for index, node in enumerate(nodes) if (pid := node.pid_of_rank(rank)))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(*FLAGS, into(folder), processes=2)
    return losses(folder)


def kill_after_a_checkpoint(run: Run, folder: Path, pid: int) -> None:
    """It is held, so that it does not end before."""
    run.wait_until(lambda: 4 in checkpoint_steps(folder) and last_step(folder) > 4)
    os.kill(pid, signal.SIGKILL)
    let_go(folder)


@pytest.mark.full
def test_two_nodes_start_again_from_the_checkpoint(uninterrupted: dict[int, float], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hold(folder, STEPS - 1)
    with two_nodes(*FLAGS, *HELD, into(folder), restarts=1) as nodes:
        index, pid = wait_for_rank(nodes, 1)
        kill_after_a_checkpoint(nodes[0], folder, pid)
        ends = [node.finish() for node in nodes]
    assert [status for status, _ in ends] == [0, 0], ends
    assert losses(folder) == uninterrupted
    assert "rank 1 was killed by SIGKILL (often: out of memory). Restarting all processes" in ends[index][1]
    survivor = ends[1 - index][1]
    assert "Error: lost the connection to another rank. Rank 1 does not respond" in survivor
    assert "loaded" in survivor  # rank 0 is here, and loaded the checkpoint of step 4
    assert "Traceback" not in survivor


@pytest.mark.full
def test_plain_torchrun_starts_again_and_gives_half_a_minute_to_save(
    uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=2")
    command = (sys.executable, "-m", "torch.distributed.run", *options, "-m", "torchtitan.train")
    folder = tmp_path / "run"
    hold(folder, STEPS - 1)
    with started(*FLAGS, *HELD, "--training.steps=100000", into(folder), command=command) as run:
        run.wait_until(lambda: run.pid_of_rank(1))
        kill_after_a_checkpoint(run, folder, killed := run.pid_of_rank(1) or 0)
        run.wait_until(lambda: run.pid_of_rank(1) not in (None, killed) and last_step(folder) >= STEPS)
        os.kill(run.process.pid, signal.SIGTERM)
        _, output = run.finish()  # torchrun's own status comes from its signal
    step = last_step(folder)
    assert {step: loss for step, loss in losses(folder).items() if step <= STEPS} == uninterrupted
    assert list(losses(folder)) == list(range(1, step + 1))
    assert f"stopped by SIGTERM after step {step}; its checkpoint is saved" in output
    assert checkpoint_steps(folder)[-1] == step
    assert damage(folder / "checkpoint" / f"step-{step}") == []


@pytest.mark.full
def test_one_process_starts_again_where_the_environment_asks_torchrun_for_it(tmp_path: Path) -> None:
    """Without such a variable a single process is its own launcher, and nothing would restart it. Data that disappear
    temporarily are not a user error, because they existed before."""
    data, away = tmp_path / "data.txt", tmp_path / "away"
    shutil.copy(ROOT / "README.md", data)
    flags = (*FLAGS, f"--training.dataset_path={data}")
    train(*flags, into(tmp_path / "uninterrupted"))
    folder = tmp_path / "killed"
    hold(folder, STEPS - 1)
    with started(*flags, *HELD, into(folder), PET_MAX_RESTARTS="9") as run:
        run.wait_until(lambda: run.pid_of_rank(0) and last_step(folder) == STEPS - 1)
        data.rename(away)  # the run is held, and opened again only after it is killed
        kill_after_a_checkpoint(run, folder, run.pid_of_rank(0) or 0)
        run.wait_until(lambda: "Restarting all processes; restarts left after this one: 7." in run.output())
        away.rename(data)
        status, output = run.finish()
    assert status == 0, output
    assert "rank 0 was killed by SIGKILL" in output
    assert f"there is no file or folder {data}" in output
    assert losses(folder) == losses(tmp_path / "uninterrupted")


@pytest.mark.full
def test_a_stopped_rank_ends_the_others_in_time(tmp_path: Path) -> None:
    with two_nodes(*ENDLESS, into(tmp_path), "--comm.train_timeout_seconds=6") as nodes:
        index, pid = wait_for_rank(nodes, 1)
        nodes[0].wait_until(lambda: last_step(tmp_path) >= 2)
        os.kill(pid, signal.SIGSTOP)
        status, output = nodes[1 - index].finish()
    assert status == 1
    assert "a collective took longer than comm.train_timeout_seconds = 6. Rank 1 does not respond" in output
    assert "Traceback" not in output
    assert (tmp_path / "comm_traces" / "rank_0").stat().st_size > 0  # of the flight recorder


@pytest.mark.full
def test_a_lost_machine_is_told_of_though_the_store_was_there(tmp_path: Path) -> None:
    """Stopped processes act as a machine without power or network: connections stay open, and nothing responds."""
    with two_nodes(*ENDLESS, into(tmp_path), "--comm.train_timeout_seconds=6") as nodes:
        index, _ = wait_for_rank(nodes, 0)
        nodes[0].wait_until(lambda: last_step(tmp_path) >= 2)
        for pid in nodes[index].pids():
            os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        survivor = nodes[1 - index]
        survivor.wait_until(lambda: "Error: " in survivor.output())
        assert time.monotonic() - stopped < 90  # what waits for a dead machine by itself takes minutes
        output = survivor.output()
    assert "a collective took longer than comm.train_timeout_seconds = 6. " in output
    assert "The rendezvous store of the run does not respond" in output or "Rank 0 does not" in output
    assert "Traceback" not in output


HOOKS = {
    # what rank 1 does at its third step, and what rank 0 reports about it
    "late": ("time.sleep(1000)", "Rank 1 is at", "slow.py:9, in post_optimizer_hook"),
    "broken": (
        "raise ArithmeticError; time.sleep(1)",
        "Rank 1 failed with ArithmeticError",
        "see its own error message",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_a_rank_that_lives_but_does_not_come_is_named_with_its_reason(hook: str, tmp_path: Path) -> None:
    statement, *expected = HOOKS[hook]
    (tmp_path / "slow.py").write_text(
        "import os, time, tiny\n"
        "from torchtitan.converters import CONVERTERS, ConverterEntry\n"
        "class Slow:\n"
        "    steps = 0\n"
        "    def convert(self, model): pass\n"
        "    def post_optimizer_hook(self, models):\n"
        "        self.steps += 1\n"
        "        if os.environ['RANK'] == '1' and self.steps == 3:\n"
        f"            {statement}\n"
        "CONVERTERS.register('slow', ConverterEntry('', lambda section, target: Slow()))\n"
    )
    slow = ("--experimental.custom_import=slow", "--model.converters=slow", "--comm.train_timeout_seconds=6")
    with two_nodes(*ENDLESS, *slow, into(tmp_path), folder=tmp_path) as nodes:
        index, _ = wait_for_rank(nodes, 0)
        status, output = nodes[index].finish()
    assert status == 1, output
    assert all(words in output for words in expected), output
    assert "Traceback" not in output


SLOW_WRITER = """
import os, time, tiny
from torchtitan.checkpoint import files
from torchtitan.tools.interchange import export
def slow(write, rank):
    def hang(*arguments, **options):
        if os.environ["RANK"] == rank:
            time.sleep(SECONDS)
        return write(*arguments, **options)
    return hang
files.CheckpointWriter.write_data = slow(files.CheckpointWriter.write_data, "1")
export.save_file = slow(export.save_file, "0")
"""


@pytest.mark.full
def test_a_slow_rank_may_save_and_export_for_longer_than_a_step(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_WRITER.replace("SECONDS", "8"))
    flags = ("--experimental.custom_import=slow", "--comm.train_timeout_seconds=5", "--checkpoint.interval=4")
    more = ("--training.steps=4", "--checkpoint.last_save_in_hf", "--checkpoint.enable_checkpoint")
    output = train(*SMALL, *flags, *more, into(tmp_path), processes=2, folder=tmp_path)
    assert "training finished after step 4" in output
    assert (tmp_path / "checkpoint" / "step-4-hf" / "model.safetensors").exists()


@pytest.mark.full
def test_a_rank_that_hangs_in_a_save_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_WRITER.replace("SECONDS", "1000"))
    slow = ("--experimental.custom_import=slow", "--comm.save_timeout_seconds=6", "--checkpoint.interval=3")
    with two_nodes(*FLAGS, *slow, into(tmp_path), folder=tmp_path) as nodes:
        index, _ = wait_for_rank(nodes, 0)
        status, output = nodes[index].finish()
    assert status == 1, output
    assert "a collective took longer than comm.save_timeout_seconds = 6. Rank 1 is at " in output
    assert "slow.py:8, in hang" in output
    assert "could not be saved" not in output and "Traceback" not in output


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            ("--job.dump_folder={}/b", r"job\.dump_folder: .* \(rank 1\) is not the folder that rank 0 writes to"),
            marks=pytest.mark.full,
        ),
        pytest.param(("--training.seed=7", r"training\.seed differs between machines"), marks=pytest.mark.full),
        pytest.param(
            (
                "--training.dataset_path={}/b",
                r"training\.dataset_path: part\.txt differs between machines: [\d,]+ bytes, hash \w+ on rank 0 on ",
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--model.tokenizer_path={}/another.model", r"model\.tokenizer_path differs between machines"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["dump folder", "key", "data", "tokenizer"],
)
def test_machines_that_differ_are_refused_before_they_train(other: tuple[str, str], tmp_path: Path) -> None:
    flag, expected = other
    text = (ROOT / "README.md").read_text() * 4
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.txt").write_text(text if name == "a" else text[:-2] + "!\n")  # of the same size
    shipped = (ROOT / "torchtitan/data/assets/python_stdlib_4k.model").read_bytes()
    (tmp_path / "another.model").write_bytes(shipped + b"\xc2\x3e\x01x")  # an unknown field, which is ignored
    data = f"--training.dataset_path={tmp_path}/a"
    with two_nodes(
        *ENDLESS, data, "--checkpoint.enable_checkpoint", into(tmp_path / "run"), second_only=[flag.format(tmp_path)]
    ) as nodes:
        ends = [node.finish() for node in nodes]
    # The launcher of rank 0 ends the run; the other one loses it.
    errors = [output for status, output in ends if status == 2]
    assert errors and re.search(expected, errors[0]), ends
    assert not any("Traceback" in output for _, output in ends)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    status, output = failure(*ENDLESS, "--training.seq_len=0", into(tmp_path), PET_MAX_RESTARTS="3")
    assert status == 2
    assert output.count("training.seq_len") == 1
