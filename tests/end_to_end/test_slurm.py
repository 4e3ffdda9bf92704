"""The SLURM script on a real one: a controller and ten machines in namespaces of their own, cut off from all networks.
Its jobs overlap, because most of their time is waiting."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import CHECKPOINTS, ROOT, TINY, checkpoint_steps, into, last_step, losses, train, variables_of
from workers import PATIENCE

MACHINES = 10
FLAGS = (*TINY, *CHECKPOINTS, "--training.local_batch_size=1", "--training.steps=80")
PROGRAMS = ("slurmctld", "slurmd", "unshare", "nsenter", "setpriv", "ip")
SANDBOX = ("unshare", "--uts", "--pid", "--fork", "--kill-child")
CONFIG = """
ClusterName=test
SlurmctldHost=controller
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdTimeout=10
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{machines}] NodeAddr=10.0.0.[1-{machines}] Port=[7001-{last_port}] CPUs=96 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
# A user's module: steps take their time as long as a file is there. Whatever happens then does not come too late.
PACED = """
import pathlib, time
import tiny
from torchtitan.engine import engine
def paced(*arguments, whole=engine.forward_backward, **options):
    time.sleep(0.25 * pathlib.Path("paced").exists())
    return whole(*arguments, **options)
engine.forward_backward = paced
"""
# Takes as long as if .venv were made. Says first which start of the job this is, and waits for the signal to be sent.
SLOW_PYTHON = f"""#!/usr/bin/env bash
echo "start ${{SLURM_RESTART_COUNT:-0}}" > asked
for _ in $(seq 600); do
    [ -e "signalled ${{SLURM_RESTART_COUNT:-0}}" ] && break
    sleep 0.1
done
sleep 3
exec {sys.executable} "$@"
"""


class Cluster:
    """A SLURM, and a folder that looks like this repository, from which jobs are submitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        self.daemons: list[subprocess.Popen[bytes]] = []
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "NGPU": "1"}
        self.environment = {**os.environ, **own, "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        names = [f"n{number}" for number in range(1, MACHINES + 1)]
        for name in ("checkout", "state", *names):
            (self.folder / name).mkdir()
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and path.name != "outputs":
                (self.checkout / path.name).symlink_to(path)
        hosts = {"controller": "10.0.0.100", **{name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
        (self.folder / "hosts").write_text("\n".join([*lines, ""]))
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        config = CONFIG.format(folder=self.folder, machines=MACHINES, last_port=7000 + MACHINES)
        (self.folder / "slurm.conf").write_text(config)
        addresses = [f"ip address add {address}/32 dev lo" for address in hosts.values()]
        mount = f"mount --bind {self.folder}/hosts /etc/hosts"
        setup = " && ".join(["ip link set lo up", *addresses, mount, "hostname controller", "exec slurmctld -D"])
        self._start(*SANDBOX, "--net", "--mount", "sh", "-c", setup)
        (first,) = until(lambda: children(self.daemons[0].pid))
        self.enter = ("nsenter", f"--target={first}", "--net", "--mount", "--pid", "--uts", f"--wd={self.checkout}")
        until(lambda: program(first).startswith("slurmctld"))
        for name in names:
            setup = f"hostname {name} && exec slurmd -D -N {name}"
            self._start(*SANDBOX, "--mount-proc", "sh", "-c", setup, enter=self.enter)
        until(lambda: self.run("sinfo", "--noheader", "--states=idle", "--Node").count("main") == MACHINES)

    def _start(self, *command: str, enter: tuple[str, ...] = ()) -> None:
        command = ("setpriv", "--pdeathsig=KILL", *enter, *command)
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def stop(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
        for daemon in self.daemons:
            daemon.wait()

    def run(self, *command: str, status: int = 0, python: str = sys.executable) -> str:
        """Runs a command in the checkout. Returns its output."""
        done = subprocess.run(
            (*self.enter, *command),
            env={**self.environment, "PYTHON": python},
            cwd=self.checkout,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def submit(self, folder: Path, *flags: str, name: str = "", python: str = sys.executable) -> "Job":
        """As docs/multinode.md says."""
        log = self.folder / f"{name or folder.name}.log"
        command = ("sbatch", "--parsable", f"--output={log}", "multinode_trainer.slurm", into(folder), *flags)
        return Job(self, self.run(*command, python=python).strip(), folder, log)

    def fail(self, machine: str) -> None:
        """As in a power failure: the first process of a namespace takes all others with it."""
        (pid,) = (pid for pid in pids() if program(pid).strip() == f"slurmd -D -N {machine}")
        os.kill(pid, signal.SIGKILL)


class Job:
    """A submitted job: its dump folder, and its log so far."""

    def __init__(self, cluster: Cluster, number: str, folder: Path, log: Path) -> None:
        self.cluster = cluster
        self.number = number
        self.folder = folder
        self.log = log

    def shown(self) -> dict[str, str]:
        """What SLURM knows about it."""
        return dict(re.findall(r"\b(\w+)=(\S+)", self.cluster.run("scontrol", "show", "job", self.number)))

    def has_ended(self) -> bool:
        return self.shown()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    def until(self, condition: Callable[[], object]) -> None:
        until(lambda: condition() or self.has_ended(), self)
        assert condition(), self

    def until_step(self, step: int) -> None:
        self.until(lambda: last_step(self.folder) >= step)

    def until_it_says(self, text: str) -> None:
        self.until(lambda: self.log.exists() and text in self.log.read_text())

    def end(self) -> tuple[str, str, int]:
        """(state, exit status, how often it was queued again)."""
        until(self.has_ended, self)
        shown = self.shown()
        return shown["JobState"], shown["ExitCode"], int(shown["Restarts"])

    def machines(self) -> list[str]:
        return self.cluster.run("scontrol", "show", "hostnames", self.shown()["NodeList"]).split()

    def pid_of_rank(self, rank: int) -> int:
        marks = {f"SLURM_JOB_ID={self.number}", f"RANK={rank}"}
        return min(pid for pid in pids() if marks <= {*variables_of(pid)})  # others are its children

    def __repr__(self) -> str:
        return f"{self.shown()}\n{self.log.read_text() if self.log.exists() else 'no log'}"


def until(condition: Callable[[], Any], failure: object = "the cluster does not start") -> Any:
    """Waits for a value that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, str(failure)
        time.sleep(0.2)
    return value


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def program(pid: int) -> str:
    """'' if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        pytest.skip(f"no SLURM: {', '.join(missing)} missing (apt-get install slurm-wlm iproute2)")
    if subprocess.run((*SANDBOX, "--net", "--mount", "true"), capture_output=True).returncode:
        pytest.skip("no SLURM: this user may not make namespaces")
    cluster = Cluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_a_cluster_does_to_jobs(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.checkout / "paced.py").write_text(PACED)
    (cluster.checkout / "paced").touch()
    (cluster.checkout / "slow_python").write_text(SLOW_PYTHON)
    (cluster.checkout / "slow_python").chmod(0o755)
    paced = (*FLAGS, "--experimental.custom_import=paced")
    limited = cluster.submit(tmp_path / "limited", *paced)
    moved = cluster.submit(tmp_path / "moved", *paced)
    endless = cluster.submit(tmp_path / "endless", *FLAGS, "--training.steps=1000000")
    typo = cluster.submit(tmp_path / "typo", *FLAGS, "--training.seq_len=0")
    starting = cluster.submit(tmp_path / "starting", *FLAGS, python="./slow_python")

    # The signal before anything runs: once that may be because .venv was made.
    for start in range(2):
        asked = cluster.checkout / "asked"
        starting.until(lambda: asked.exists() and asked.read_text() == f"start {start}\n")  # noqa: B023
        cluster.run("scancel", "--batch", "--signal=USR1", starting.number)
        (cluster.checkout / f"signalled {start}").touch()
    assert starting.end() == ("FAILED", "1:0", 1), starting
    assert "Error: stopped without a checkpoint of a later step" in starting.log.read_text()

    assert typo.end() == ("FAILED", "2:0", 0), typo
    assert "training.seq_len" in typo.log.read_text()

    # A rank that is killed, and a machine that goes down.
    limited.until_step(3)
    os.kill(limited.pid_of_rank(1), signal.SIGKILL)
    moved.until_step(3)
    step_of_failure = last_step(moved.folder)
    cluster.fail(moved.machines()[1])

    endless.until_step(3)
    second = cluster.submit(endless.folder, *FLAGS, name="second")
    limited.until_it_says("Restarting all processes")
    limited.until_step(10)
    cluster.run("scontrol", "update", f"JobId={limited.number}", "TimeLimit=5")  # the signal is due 5 minutes ahead
    limited.until_it_says("SIGUSR1: the run stops")
    cluster.run("scontrol", "update", f"JobId={limited.number}", "TimeLimit=60")

    assert second.end() == ("FAILED", "2:0", 0), second
    assert "another run" in second.log.read_text()
    tasks = cluster.run("srun", "--ntasks=2", sys.executable, "train.py", *FLAGS, into(tmp_path / "tasks"), status=2)
    assert "this is one of 2 tasks" in tasks and not (tmp_path / "tasks").exists()
    cluster.run("scancel", endless.number)
    assert endless.end()[::2] == ("CANCELLED", 0), endless
    assert checkpoint_steps(endless.folder)[-1] == last_step(endless.folder)

    # Preemption: SIGTERM to all processes except the script.
    moved.until(lambda: moved.shown()["Restarts"] == "1")
    moved.until_step(step_of_failure + 3)
    urgent = (f"--nodelist={','.join(moved.machines())}", "--cpus-per-task=96", "--output=/dev/null", "--wrap=sleep 1")
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--ntasks-per-node=1", *urgent)
    moved.until_it_says("stopped by SIGTERM after step")

    (cluster.checkout / "paced").unlink()
    reference = tmp_path / "reference"
    train(f"--job.config_file={ROOT / 'train_configs/debug_model.toml'}", *FLAGS, into(reference), processes=2)
    for job, starts in ((limited, 1), (moved, 2)):
        assert job.end() == ("COMPLETED", "0:0", starts), job
        assert losses(job.folder) == losses(reference), job
    (left,) = cluster.checkout.glob("slurm-*")
    assert left.name == f"slurm-{endless.number}.stopped"
    assert int(left.read_text()) == last_step(endless.folder)
