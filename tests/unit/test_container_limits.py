"""Limits of containers: of version 1 and 2 of control groups, and of groups within groups."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan import container, launch
from torchtitan.device import find_device

ROOT = Path(__file__).resolve().parents[2]
V2 = "{root} {point} rw shared:1 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "{root} {point} rw - cgroup cgroup rw,{controllers}"


def lay_out(folder: Path, mounts: list[str], groups: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "mountinfo").write_text("".join(f"30 20 0:26 {mount}\n" for mount in mounts))
    (folder / "cgroup").write_text(groups)


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "quota", "memory"),
    [
        # Version 2: a container sees its group as the root.
        (["/ {t}/v2"], "0::/", {"v2/cpu.max": "150000 100000\n", "v2/memory.max": "3000\n"}, 1.5, 3000),
        (["/ {t}/v2"], "0::/", {"v2/cpu.max": "max 100000\n", "v2/memory.max": "max\n"}, None, None),
        # The group above has the limit, as in a SLURM job's step, or a pod's container.
        (
            ["/ {t}/v2"],
            "0::/job/step",
            {"v2/job/step/cpu.max": "400000 100000", "v2/job/cpu.max": "300000 100000", "v2/job/memory.max": "2000"},
            3.0,
            2000,
        ),
        # Docker with version 1 shows the machine's path, of which the container's part is mounted.
        (
            ["/docker/7 {t}/cpu cpu,cpuacct", "/docker/7 {t}/memory memory"],
            "5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n0::/",
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "1000",
            },
            0.5,
            1000,
        ),
        (
            ["/ {t}/cpu cpu", "/ {t}/memory memory"],
            "5:cpu:/a/b\n4:memory:/a/b",
            {
                "cpu/a/b/cpu.cfs_quota_us": "-1",
                "cpu/a/b/cpu.cfs_period_us": "100000",
                "cpu/a/cpu.cfs_quota_us": "250000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "memory/a/b/memory.limit_in_bytes": "9223372036854771712",
                "memory/a/memory.limit_in_bytes": "5000",
            },
            2.5,
            5000,
        ),
        # Another view of the groups than the mounted one, and what cannot be read.
        (["/x {t}/v2"], "0::/../y", {"v2/cpu.max": "100000 100000", "v2/memory.max": "nonsense"}, 1.0, None),
        ([], "", {}, None, None),
    ],
)
def test_the_least_limit_of_all_groups_counts(
    mounts: list[str],
    groups: str,
    files: dict[str, str],
    quota: float | None,
    memory: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = []
    for mount in mounts:
        root, point, *controllers = mount.format(t=tmp_path).split()
        form = V1 if controllers else V2
        lines.append(form.format(root=root, point=point, controllers="".join(controllers)))
    lay_out(tmp_path, lines, groups, files)
    monkeypatch.setattr(container, "PROCESS", tmp_path)
    monkeypatch.setattr(container, "affinity_cores", lambda: 64)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert find_device(0).memory_capacity_bytes() == container.memory_bytes() == (memory or installed)
    assert container.available_cores() == (max(1, int(quota)) if quota else 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(64)
        find_device(0)  # where no launcher has divided the cores among ranks
        assert torch.get_num_threads() == container.available_cores()
    finally:
        torch.set_num_threads(before)
    launch._set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, container.available_cores() // 2))


@pytest.fixture
def group() -> Iterator[Path]:
    """A real group with half a core and 1 GiB, where this user may make one."""
    for folder in (Path("/sys/fs/cgroup/cpu/torchtitan_test"), Path("/sys/fs/cgroup/torchtitan_test")):
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text("50000 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text("50000")
            yield folder
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("this user cannot make a control group")


def test_a_real_quota_is_seen(group: Path) -> None:
    code = "from torchtitan.container import available_cores, cpu_quota; print(cpu_quota(), available_cores())"
    enter = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
    done = subprocess.run([sys.executable, "-c", enter + code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0.5 1\n", done.stderr
