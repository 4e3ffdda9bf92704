"""Tasks of a scheduler that would each be a run; the SLURM script's syntax, and the Kubernetes example."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import ROOT, TINY, into, python

from torchtitan.errors import ConfigError
from torchtitan.launcher.processes import refuse_lone_tasks

DOCKERFILE = (ROOT / "Dockerfile").read_text()
SCRIPT = ROOT / "multinode_trainer.slurm"


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
    done = python(*launcher, "train.py", *TINY, into(tmp_path / "out"), **tasks)
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
    for resource in yaml.safe_load_all((ROOT / "docs/examples/kubernetes.yaml").read_text()):
        for version in ("1.31", schemas.latest_version()):
            schemas.validate(resource, version, strict=True)
