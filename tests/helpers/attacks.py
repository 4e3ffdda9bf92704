"""Attacks on tiny runs, each followed by the same command again, as a user would repeat it: `ATTACKS`.

An attack raises AssertionError if a guarantee of docs/checkpoints.md is violated. All its random choices come from
`Trial.random`. The timing of the processes does not, so a trial's seed repeats the attack, but not to the microsecond.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from runs import HELPERS, TINY, checkpoint_steps, fill, last_step, lines_of, losses, variables_of

from benchmarks.forks import ForkedProcess
from torchtitan.checkpoint.manifest import MANIFEST, damage

ROOT = Path(__file__).parents[2]
STEPS = 8
PATIENCE = 300  # seconds; allows for busy machines
FLAGS = (
    *TINY,
    "--model.flavor=shallow",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
    "--validation.enabled",
    "--validation.freq=3",
    "--validation.steps=2",
)
STARTING = ("start", "first step")
TRAINING = ("step", "save", "validation")
EVERYWHERE = (*STARTING, *TRAINING, "exit")
BESIDE_IMPORTS = ("start", "start", "first step", "exit")  # only in a fresh interpreter
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
RANDOM_WORDS = ["loss", "gradient", "layer", "token", "weight", "rank", "step", "load", "batch", "scale", "norm"]


@dataclass(frozen=True)
class Undisturbed:
    """The result of a run without attacks: losses by step, hashes of the last checkpoint's tensors, and the seconds
    from the start to the first step."""

    losses: dict[int, float]
    tensors: dict[str, str]
    seconds: float


@dataclass
class Trial:
    """One attack.

    Attributes:
        folder: of this trial; the run's dump folder is `run` in it.
        processes: 1, or 2 under the launcher.
        async_mode: of its checkpoints.
        real: whether the attacked process is a fresh interpreter instead of a fork.
        template: folder of a run that has reached step STEPS - 2.
        data: the training data.
        facts: what happened, for the table and the record.
        outputs: the output of each start.
    """

    folder: Path
    random: random.Random
    processes: int
    async_mode: str
    real: bool
    undisturbed: Undisturbed
    template: Path
    data: Path
    facts: dict[str, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def flags(self) -> list[str]:
        files = [f"--job.dump_folder={self.run}", f"--training.dataset_path={self.data}"]
        return [*FLAGS, f"--checkpoint.async_mode={self.async_mode}", f"--training.steps={STEPS}", *files]


class Start:
    """A running command. Its processes are those that share its stderr.

    Args:
        flags: of the command, in addition to the trial's where that is train.py.
        command: module or script to run instead of train.py, with its arguments.
        reader: destination of stdout and stderr instead of a file.
        variables: added to this process's environment.
    """

    def __init__(
        self,
        trial: Trial,
        *flags: str,
        command: Sequence[str] = (),
        real: bool = False,
        reader: int | None = None,
        **variables: str,
    ) -> None:
        self.path = trial.folder / f"screen{len(trial.outputs)}"
        trial.outputs.append("")
        self.trial, self.number = trial, len(trial.outputs) - 1
        with self.path.open("wb") as file:
            screen = file.fileno() if reader is None else reader
            self.mark = os.readlink(f"/proc/self/fd/{screen}")
            training = ("-m", "torchtitan.launch", str(ROOT / "train.py"), *trial.flags())
            inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
            own = {
                "NGPU": str(trial.processes),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}",
                "TMPDIR": str(trial.temporary),
            }
            trial.temporary.mkdir(exist_ok=True)
            start: Any = subprocess.Popen if real else ForkedProcess
            self.process = start(
                [sys.executable, *(command or training), *flags],
                env={**inherited, **own, **variables},
                stdout=screen,
                stderr=screen,
                cwd=str(trial.folder),
                start_new_session=True,
            )

    def output(self) -> str:
        return self.path.read_text(errors="replace")

    def pids(self) -> list[int]:
        def screen(pid: str) -> str:
            with suppress(OSError):
                return os.readlink(f"/proc/{pid}/fd/2")
            return ""

        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and screen(pid) == self.mark]

    def ranks(self) -> list[int]:
        """Pids of the running ranks."""
        if self.trial.processes == 1:
            return [self.process.pid] if self.process.poll() is None else []
        pid_of = {}
        for pid in self.pids():
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                ranks = [variable[5:] for variable in variables_of(pid) if variable.startswith("RANK=")]
                if name.startswith("rank"):
                    ranks = [name[4:]]
                if ranks:
                    pid_of[int(ranks[0])] = pid
        return [pid_of[rank] for rank in sorted(pid_of)]

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """False if the run ends first."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "the run does not reach the condition in time"
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)
        return True

    def wait(self, seconds: float) -> None:
        """Waits for `seconds`, or until the run has ended."""
        until = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > until)

    def finish(self, patience: float = PATIENCE) -> int:
        """Waits for the end of the command and of all its processes. Returns the exit status, 128 + n for a signal."""
        try:
            status: int = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end within {patience:.0f} s") from None
        deadline = time.monotonic() + 30
        while left := self.pids():
            assert time.monotonic() < deadline, f"processes are still running: {left}"
            time.sleep(0.02)
        self.trial.outputs[self.number] = self.output()
        assert "Traceback" not in self.output(), "the output has a traceback"
        return status if status >= 0 else 128 - status

    def kill(self) -> None:
        """SIGKILL to every process, as in a power failure."""
        while pids := self.pids():
            for pid in pids:
                send(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait()
        self.trial.outputs[self.number] = self.output()


@contextmanager
def started(trial: Trial, *flags: str, **options: Any) -> Iterator[Start]:
    start = Start(trial, *flags, **options)
    try:
        yield start
    finally:
        start.kill()


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_for_moment(start: Start, phases: tuple[str, ...]) -> None:
    """Waits for a random moment in one of the phases; both are drawn first."""
    trial, draw = start.trial, start.trial.random
    phase = draw.choice(BESIDE_IMPORTS if trial.real else phases)
    trial.facts["phase"] = phase
    step, late = draw.randrange(1, STEPS), draw.random()
    if phase == "start":
        seconds = trial.undisturbed.seconds * late * (5 if trial.real else 1)
        start.wait(seconds)
    elif phase == "first step":
        start.wait_until(lambda: "MFU counts" in start.output())
        time.sleep(late * 0.3)
    elif phase == "save":
        at = step // 2 * 2
        start.wait_until(lambda: last_step(trial.run) >= at and list((trial.run / "checkpoint").glob("*.tmp")))
        time.sleep(late * 0.1)
    elif phase == "validation":
        start.wait_until(lambda: last_step(trial.run) >= 3)
        time.sleep(late * 0.05)
    elif phase == "step":
        start.wait_until(lambda: last_step(trial.run) >= step)
        time.sleep(late * 0.2)
    else:
        start.wait_until(lambda: "training finished" in start.output())
        time.sleep(late * 0.3)
    trial.facts["ended before"] = start.process.poll() is not None


def published(trial: Trial) -> list[int]:
    steps: list[int] = checkpoint_steps(trial.run)
    return steps


def assert_intact(trial: Trial) -> None:
    for step in published(trial):
        faults = damage(trial.run / "checkpoint" / f"step-{step}")
        assert faults == [], f"step {step} is published but damaged: {faults}"


def tensor_hashes(checkpoint: Path) -> dict[str, str]:
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    return {name: record["sha256"] for name, record in files.items() if name.endswith(".distcp")}


def go_on(trial: Trial, all_losses: bool = True, **options: Any) -> Start:
    """Runs the same command again. It resumes from the newest checkpoint, finishes, and equals an undisturbed run."""
    before = published(trial)
    assert_intact(trial)
    with started(trial, **options) as start:
        status = start.finish()
        assert status == 0, f"the same command again exits with status {status}"
    output = start.output()
    if before and before[-1] < STEPS:
        assert f"loaded {trial.run}/checkpoint/step-{before[-1]}" in output, (
            f"it does not resume from step {before[-1]}"
        )
    assert_whole(trial, all_losses)
    assert set(before) <= set(published(trial)), f"published steps {before} became {published(trial)}"
    return start


def assert_whole(trial: Trial, all_losses: bool = True) -> None:
    """Asserts that a finished run equals an undisturbed one and left no temporary files."""
    assert published(trial)[-1] == STEPS, f"checkpoints {published(trial)}"
    assert_intact(trial)
    tensors = tensor_hashes(trial.run / "checkpoint" / f"step-{STEPS}")
    assert tensors == trial.undisturbed.tensors, "the last checkpoint's tensors differ"
    reported = any("loss" in line for line in lines_of(trial.run / "metrics.jsonl"))
    actual, expected = losses(trial.run) if reported else {}, trial.undisturbed.losses
    assert actual.items() <= expected.items(), f"losses differ: {actual}, not {expected}"
    assert not all_losses or actual == expected, f"losses of steps {sorted(expected.keys() - actual.keys())} are lost"
    left = [str(path.relative_to(trial.run)) for path in trial.run.rglob("*tmp*")]
    assert not left, f"left behind: {left}"


def kill_a_process(trial: Trial) -> None:
    """SIGKILL to a rank, the launcher, or all."""
    target = trial.random.choice(("rank", "launcher", "all") if trial.processes > 1 else ("rank", "all"))
    trial.facts["target"] = target
    with started(trial, real=trial.real) as start:
        wait_for_moment(start, EVERYWHERE)
        if target == "rank":
            start.wait_until(start.ranks)
            ranks = start.ranks()
            if ranks:
                send(trial.random.choice(ranks), signal.SIGKILL)
            status = start.finish()
            assert status in (0, 137), f"status {status}"
            if trial.processes > 1 and status == 137:
                assert "was killed by SIGKILL" in start.output(), "the killed rank is not named"
        elif target == "launcher":
            start.process.kill()
            start.finish()
        else:
            start.kill()
    go_on(trial)


def kill_with_restarts(trial: Trial) -> None:
    """SIGKILL to a rank, once or twice, with a launcher that may restart all ranks."""
    with started(trial, PET_MAX_RESTARTS="2") as start:
        for _ in range(trial.random.choice((1, 1, 2))):
            wait_for_moment(start, EVERYWHERE)
            ranks = set(trial_ranks(start))
            if ranks:
                send(trial.random.choice(sorted(ranks)), signal.SIGKILL)
                start.wait_until(partial(has_others, start, ranks))
        status = start.finish()
    assert status == 0, f"status {status}"
    assert_whole(trial)


def has_others(start: Start, ranks: set[int]) -> bool:
    return not ranks.issuperset(trial_ranks(start))


def trial_ranks(start: Start) -> list[int]:
    """Pids of the ranks of a run that has a launcher even for one process."""
    return [pid for pid in start.pids() if pid != start.process.pid]


def stop_by_signal(trial: Trial) -> None:
    """SIGTERM, SIGUSR1, SIGHUP or SIGINT to the process group, the launcher, or a rank; once or twice."""
    number = trial.random.choice((*STOPS, signal.SIGTERM, signal.SIGINT))
    target = trial.random.choice(("group", "launcher", "rank"))
    twice = trial.random.random() < 0.4
    pause = trial.random.uniform(0, 1.2)
    trial.facts.update(signal=signal.Signals(number).name, target=target, twice=twice)
    with started(trial, real=trial.real) as start:
        wait_for_moment(start, EVERYWHERE)
        for _ in range(1 + twice):
            if target == "rank":
                start.wait_until(start.ranks)
            pids = {"group": [-start.process.pid], "launcher": [start.process.pid], "rank": start.ranks()[-1:]}[target]
            if start.process.poll() is None and pids:
                with suppress(PermissionError):
                    send(pids[0], number)
            time.sleep(pause if twice else 0)
        status = start.finish(PATIENCE / 2)
        output = start.output()
        if status - 128 == number and not output:
            trial.facts["phase"] = "interpreter's start"
        elif number == signal.SIGINT:
            assert status in (0, 130), f"status {status}"
        else:
            assert status == 0, f"status {status}"
            if (step := last_step(trial.run)) and "training finished" not in output:
                assert published(trial)[-1:] == [step], f"step {step} is not saved; saved are {published(trial)}"
    go_on(trial)


def freeze(trial: Trial) -> None:
    """SIGSTOP to a rank or to all for a few seconds, or permanently: the others end, or a second start is refused."""
    for_good = trial.random.random() < 0.3
    phases = ("step", "save") if for_good else EVERYWHERE
    seconds = trial.random.uniform(0.2, 4)
    trial.facts["for good"] = for_good
    timeout = [f"--comm.{when}_timeout_seconds=5" for when in ("train", "save")] if for_good else []
    with started(trial, *timeout, PET_SHUTDOWN_TIMEOUT="2") as start:
        wait_for_moment(start, phases)
        start.wait_until(start.ranks)
        pids = start.ranks()
        if trial.random.random() < 0.6:
            pids = pids[:1] if trial.random.random() < 0.5 else pids[-1:]
        for pid in pids:
            send(pid, signal.SIGSTOP)
        if not for_good:
            time.sleep(seconds)
            for pid in pids:
                send(pid, signal.SIGCONT)
            status = start.finish()
            assert status == 0, f"status {status}"
        elif len(pids) < trial.processes:
            status = start.finish()
            assert status in (0, 1), f"status {status}"
            assert status == 0 or "Error:" in start.output(), "it does not say why it failed"
        elif start.process.poll() is None and start.ranks():
            refused = Start(trial)
            status = refused.finish()
            finished = status == 0 and "training finished" in start.output()  # frozen after its last step
            refused_cleanly = status == 2 and "another run" in refused.output()
            assert finished or refused_cleanly, f"a second run exits with status {status}"
    go_on(trial)


def change_data(trial: Trial) -> None:
    """The data file is truncated, replaced, or temporarily missing."""
    how = trial.random.choice(("shortened", "replaced", "away"))
    restarts = how == "away" and trial.random.random() < 0.5
    seconds = trial.random.uniform(0.1, 1.5)
    trial.facts.update(how=how, restarts=restarts)
    original, trial.data = trial.data, trial.folder / "data.jsonl"
    shutil.copy(original, trial.data)
    with started(trial, **({"PET_MAX_RESTARTS": "20"} if restarts else {})) as start:
        wait_for_moment(start, ("first step", "step", "save"))
        if how == "shortened":
            os.truncate(trial.data, trial.random.randrange(trial.data.stat().st_size))
        elif how == "replaced":
            other = trial.folder / "other"
            other.write_bytes(original.read_bytes()[::-1])
            other.replace(trial.data)
        else:
            away = trial.data.rename(trial.folder / "away")
            time.sleep(seconds)
            away.rename(trial.data)
        status = start.finish()
        output = start.output()
    expected = (0,) if restarts else (0, 2)
    assert status in expected, f"status {status}"
    if status == 2:
        assert str(trial.data) in output and output.count("Error:") == 1, "not exactly one error that names the file"
        step = last_step(trial.run)
        assert not step or published(trial)[-1:] == [step], f"step {step} is not saved; saved are {published(trial)}"
    elif status == 0:
        assert_whole(trial)
    shutil.copy(original, trial.folder / "again")
    (trial.folder / "again").replace(trial.data)
    go_on(trial)


def damage_checkpoints(trial: Trial) -> None:
    """Checkpoint files are truncated, modified or deleted between two starts."""
    shutil.copytree(trial.template, trial.run)
    steps = published(trial)
    intact = set(steps)
    for _ in range(trial.random.choice((1, 1, 2, 3, 8))):
        step = trial.random.choice([steps[-1], *steps])
        files = sorted((trial.run / "checkpoint" / f"step-{step}").iterdir())
        if files:
            hurt(trial.random.choice(files), trial.random)
        intact.discard(step)
    trial.facts.update(intact=sorted(intact))
    with started(trial) as start:
        status = start.finish()
        output = start.output()
    if intact:
        assert status == 0, f"status {status}"
        assert f"loaded {trial.run}/checkpoint/step-{max(intact)}" in output, (
            "it does not resume from the newest intact checkpoint"
        )
        for step in steps:
            if step > max(intact):
                assert f"step-{step}" in output, f"the damage of step {step} is not reported"
                shutil.rmtree(next((trial.run / "checkpoint").glob(f"step-{step}.abandoned-*")))
            elif step not in intact:
                shutil.rmtree(trial.run / "checkpoint" / f"step-{step}")
        assert_whole(trial)
        assert intact <= set(published(trial))
    else:
        assert status == 2, f"status {status}"
        assert "Error:" in output and "training finished" not in output
        assert losses(trial.run) == losses(trial.template), "the losses so far are lost"
        shutil.rmtree(trial.run)
        shutil.copytree(trial.template, trial.run)
        go_on(trial)


def hurt(path: Path, draw: random.Random) -> None:
    how = draw.choice(("shorten", "flip", "delete"))
    content = bytearray(path.read_bytes())
    if how == "delete" or not content:
        path.unlink()
    elif how == "shorten":
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


def leave_the_screen(trial: Trial) -> None:
    """The reader of the output goes away, or stops reading; the run may also be asked to stop meanwhile."""
    how = trial.random.choice(("gone", "not reading", "not reading, SIGTERM"))
    trial.facts["how"] = how
    seconds = trial.random.uniform(0, 3)
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    with started(trial, reader=write_end) as start:
        os.close(write_end)
        if how == "gone":
            time.sleep(seconds)
            os.close(read_end)
        else:
            start.wait_until(lambda: last_step(trial.run) >= 1 or start.ranks())
            time.sleep(seconds)
            if "SIGTERM" in how:
                start.process.send_signal(signal.SIGTERM)
                start.finish(60)  # although nobody reads
            while start.process.poll() is None and os.read(read_end, 1 << 16):
                pass
            os.close(read_end)
        status = start.finish()
    if "SIGTERM" in how:
        assert status in (0, 143), f"status {status}"
    else:
        assert status == 0, f"status {status}"
        assert_whole(trial)
    go_on(trial)


def run_twice(trial: Trial) -> None:
    """The same command is started again while it is running or stopped. A second start waits for a while."""
    stopped = trial.random.random() < 0.6
    trial.facts["stopped"] = stopped
    with started(trial) as first:
        if trial.random.random() < 0.7:
            wait_for_moment(first, EVERYWHERE)
        else:
            trial.facts["phase"] = "at once"
        pids = first.ranks() if stopped else []
        for pid in pids:
            send(pid, signal.SIGSTOP)
        with started(trial) as second:
            if pids:
                second.wait(20)  # until it is refused
            for pid in pids:
                send(pid, signal.SIGCONT)
            ends = [first.finish(), second.finish()]
            outputs = [first.output(), second.output()]
    trial.facts["statuses"] = ends
    assert sorted(ends) in ([0, 0], [0, 2]), f"statuses {ends}"
    if 2 in ends:
        refused = outputs[ends.index(2)]
        assert "another run" in refused and refused.count("Error:") == 1, "not exactly one error"
    else:
        assert any("finished its" in output for output in outputs), "both runs trained"
    assert_whole(trial)


def fill_the_disk(trial: Trial) -> None:
    """The disk of the dump folder has no space, or no room for new files, temporarily or permanently."""
    how = trial.random.choice(("full", "no new files"))
    seconds = trial.random.choice((0.0, trial.random.uniform(0.1, 3)))
    trial.facts.update(how=how, for_good=not seconds)
    trial.run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m,nr_inodes=1000", "none", trial.run], check=True)
    try:
        with started(trial) as start:
            wait_for_moment(start, EVERYWHERE)
            if how == "full":
                filler = fill(trial.run)
            else:
                usage = os.statvfs(trial.run)
                remount(trial.run, usage.f_files - usage.f_ffree)
            if seconds:
                start.wait(seconds)
            else:
                status = start.finish()
            if how == "full":
                filler.unlink()
            else:
                remount(trial.run, 1000)
            status = start.finish()
            output = start.output()
        assert status in (0, 2), f"status {status}"
        assert status == 0 or output.count("Error:") == 1, "not exactly one error"
        go_on(trial, all_losses=" lost so far" not in output)
    finally:
        subprocess.run(["umount", "--lazy", trial.run], check=True)


def remount(disk: Path, files: int) -> None:
    subprocess.run(["mount", "-o", f"remount,nr_inodes={files}", disk], check=True, stderr=subprocess.DEVNULL)


def remove_files(trial: Trial) -> None:
    """The dump folder, metrics.jsonl or the checkpoints are removed while the run writes them."""
    name = trial.random.choice(("", "metrics.jsonl", "checkpoint"))
    trial.facts["what"] = name or "dump folder"
    with started(trial) as start:
        wait_for_moment(start, EVERYWHERE)
        path = trial.run / name
        was_there, running = path.exists(), start.process.poll() is None
        path.unlink(missing_ok=True) if path.suffix else shutil.rmtree(path, ignore_errors=True)
        status = start.finish()
        output = start.output()
    assert status in (0, 2), f"status {status}"
    assert status == 0 or output.count("Error:") == 1, "not exactly one error"
    trial.facts["said"] = "removed" in output
    if running and was_there and trial.facts["phase"] in TRAINING and last_step(trial.run) == STEPS:
        assert "removed" in output, "it does not report the removal"
    go_on(trial, all_losses=False)


# Name in the table -> the attack, and its share of the trials: 3 of 5 are of these, the others are foreign inputs.
ATTACKS: dict[str, tuple[Callable[[Trial], None], int]] = {
    "process killed": (kill_a_process, 75),
    "rank killed, restarts": (kill_with_restarts, 20),
    "signals": (stop_by_signal, 65),
    "processes stopped": (freeze, 25),
    "data file changed": (change_data, 25),
    "checkpoints damaged": (damage_checkpoints, 25),
    "screen not read": (leave_the_screen, 15),
    "two runs": (run_twice, 20),
    "disk full": (fill_the_disk, 15),
    "files removed": (remove_files, 15),
}


def write_data(path: Path) -> None:
    """JSONL of words drawn from a small vocabulary, so that the loss can fall."""
    draw = random.Random(0)
    lines = (json.dumps({"text": " ".join(draw.choices(RANDOM_WORDS, k=40))}) for _ in range(2500))
    path.write_text("".join(f"{line}\n" for line in lines))
