"""What a container may use of its machine: cores and memory, by affinity and control groups (man 7 cgroups)."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")


def affinity_cores() -> int:
    """CPU cores that this process may run on."""
    # macOS and Windows have no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores() -> int:
    """CPU cores whose whole time this process may use: a group may have a quota, beyond which all its threads wait."""
    return max(1, min(affinity_cores(), math.floor(cpu_quota())))


def cpu_quota() -> float:
    """The CPU time that the groups of this process may use at a time, in cores; many if there is no limit."""
    quotas = [float(2**20)]
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            quotas += [int(quota) / int(period)] if quota != "max" else []
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            quotas += [int(quota) / int(period)] if int(quota) > 0 else []
    return min(quotas)


def memory_bytes() -> int:
    """The memory of this machine, or the limit of the groups of this process, if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                limits.append(int((group / name).read_text()))
    return min(limits)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the groups with this controller that the process is in, of version 1 and 2, and of all groups that
    these are in, as far as they can be seen: limits of each count."""
    with contextlib.suppress(OSError):
        groups = {}  # controller -> path; "" in version 2
        for line in (PROCESS / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            groups.update(dict.fromkeys(names.split(","), path))
        for line in (PROCESS / "mountinfo").read_text().splitlines():
            mounted, _, about = line.partition(" - ")
            root, point = mounted.split()[3:5]
            kind, _, options = about.split(" ", 2)
            name = "" if kind == "cgroup2" else controller
            if name not in groups or not (kind == "cgroup2" or (kind == "cgroup" and name in options.split(","))):
                continue
            # In a container the path may be the machine's, of which only the part from `root` on is mounted.
            path = os.path.relpath(groups[name], root)
            group = Path(point) if path.startswith("..") else Path(point, path)
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(point))
