"""Runs the SLURM script with a fake `srun` and `scontrol` that start two machines on loopback; checks the Kubernetes
example."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ROOT, TINY, checkpoint_steps, into, last_step, python, started

from torchtitan.errors import ConfigError
from torchtitan.launcher.processes import refuse_lone_tasks

DOCKERFILE = (ROOT / "Dockerfile").read_text()
SCRIPT = ROOT / "multinode_trainer.slurm"
FLAGS = (*TINY, "--training.local_batch_size=1")

# Like the real one: runs a command on every machine, and forwards SIGUSR1 to all processes there.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
tasks=()
trap 'for task in "${tasks[@]}"; do kill -USR1 $(pstree_of "$task"); done' USR1
pstree_of() { echo "$1"; for child in $(pgrep -P "$1"); do pstree_of "$child"; done; }
export SLURM_STEP_ID=0 SLURM_NTASKS="$SLURM_JOB_NUM_NODES"
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_PROCID=$node "$@" & tasks+=($!); done
worst=0
for task in "${tasks[@]}"; do
    while true; do wait "$task"; status=$?; kill -0 "$task" 2>/dev/null || break; done
    ((status > worst)) && worst=$status
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf '127.0.0.1\\n127.0.0.2\\n' ;;
    *) echo "$@" >> "$SCONTROL_LOG" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, Any]:
    """Options of `started`: a copy of the script, as SLURM makes one, and SLURM's environment variables."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    copy = shutil.copy(SCRIPT, tmp_path / "slurm_script")
    return {
        "command": ("bash", str(copy)),
        "folder": tmp_path,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(1000 + os.getpid() % 9000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
    }


def test_trains_on_two_machines(slurm: dict[str, Any], tmp_path: Path) -> None:
    with started(*FLAGS, into(tmp_path / "out"), "--training.steps=3", **slurm) as run:
        status, output = run.finish()
    assert status == 0, output
    assert "FSDP 2" in output
    assert last_step(tmp_path / "out") == 3
    assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.full
def test_is_queued_again_when_the_machines_are_taken_away(slurm: dict[str, Any], tmp_path: Path) -> None:
    saving = ("--checkpoint.enable_checkpoint", "--training.steps=100000")
    with started(*FLAGS, into(tmp_path / "out"), *saving, **slurm) as run:
        run.wait_until(lambda: last_step(tmp_path / "out") >= 2)
        os.kill(run.process.pid, signal.SIGUSR1)  # to the script only
        _, output = run.finish()
        deadline = time.monotonic() + 30
        while run.pids() and time.monotonic() < deadline:  # a process may be exiting
            time.sleep(0.05)
        assert run.pids() == []
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n", output
    step = last_step(tmp_path / "out")
    assert f"stopped by SIGUSR1 after step {step}; its checkpoint is saved" in output
    assert checkpoint_steps(tmp_path / "out") == [step]


@pytest.mark.full
def test_reports_a_failure(slurm: dict[str, Any], tmp_path: Path) -> None:
    with started(*FLAGS, into(tmp_path / "out"), "--training.seq_len=0", **slurm) as run:
        status, output = run.finish()
    assert status == 2, output
    assert "training.seq_len" in output
    assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.parametrize(
    "tasks",
    [
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "ENVIRONMENT": "BATCH", "NGPU": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "2", "PMI_RANK": "1", "NGPU": "2"},
    ],
    ids=lambda tasks: next(iter(tasks)),
)
def test_tasks_that_would_each_be_a_run_are_refused(tasks: dict[str, str], tmp_path: Path) -> None:
    launcher = ("-m", "torchtitan.launch") if "NGPU" in tasks else ()
    done = python(*launcher, "train.py", *FLAGS, into(tmp_path / "out"), **tasks)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert output.count("Error:") == 1 and "this is one of 2 tasks" in output and "./run_train.sh" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", [{"ENVIRONMENT": "BATCH"}, {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_script_or_a_shell_of_a_job_may_train(script: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", **script}.items():
        monkeypatch.setenv(name, value)
    refuse_lone_tasks()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(ConfigError, match="2 tasks"):  # mpirun in that script
        refuse_lone_tasks()


def test_the_scripts_are_free_of_what_linters_find() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", SCRIPT], check=True, cwd=ROOT)
    if hadolint := shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        subprocess.run([hadolint, "Dockerfile"], check=True, cwd=ROOT)


def test_the_kubernetes_example_is_whole() -> None:
    service, job = yaml.safe_load_all((ROOT / "docs/examples/kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    machines = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == machines == int(environment["PET_NNODES"])
    assert environment["PET_RDZV_ENDPOINT"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (ROOT / f"train_configs/{environment['CONFIG_FILE']}.toml").exists()
    assert pod["securityContext"]["runAsUser"] == int(re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[-1])
    (workdir,) = re.findall(r"^WORKDIR (\S+)\nENTRYPOINT", DOCKERFILE, re.MULTILINE)
    assert workdir in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_kubernetes_example_fits_the_schema() -> None:
    """The oldest version has required fields that later ones do not."""
    schemas = pytest.importorskip("kubernetes_validate")
    for part in yaml.safe_load_all((ROOT / "docs/examples/kubernetes.yaml").read_text()):
        for version in ("1.31", schemas.latest_version()):
            schemas.validate(part, version, strict=True)
