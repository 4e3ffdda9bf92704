"""Waiting OpenMP threads spin on a quiet machine, and sleep on a busy one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan import launch

ROOT = Path(__file__).resolve().parents[2]

# CPU seconds while nothing is computed, in a separate process, so that its OpenMP threads are known.
PROGRAM = """
import json, time, torch
from torchtitan import device
from torchtitan.launcher import monitor
from torchtitan.launcher.monitor import watching
from torchtitan.run import openmp_threads
from torchtitan.logging import init_logging

def spun():
    total = 0.0
    for _ in range(20):
        x.add_(1)
        before = time.process_time()
        time.sleep(0.004)
        total += time.process_time() - before
    return total

init_logging(0, 1, False)
torch.set_num_threads(2)
x, seconds, lacking = torch.ones(1 << 18), [], 0.0
openmp_threads.LOOK_INTERVAL = 0.01
looks = 0
def seconds_without_a_core():
    global looks
    looks += 1
    return lacking * time.perf_counter()
device._seconds_without_a_core = seconds_without_a_core
with watching(openmp_threads.limit_spinning()):
    for lacking in (0.0, 1.0, 0.0, 1.0):
        before = looks
        while looks < before + 6 and monitor._due:  # it is not watched where the user has decided
            time.sleep(0.01)
        time.sleep(0.1)
        seconds.append(spun())
print(json.dumps(seconds))
"""


def seconds_spun(**environment: str) -> tuple[list[float], str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**ours, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    *screen, seconds = run.stdout.splitlines()
    return json.loads(seconds), "\n".join(screen)


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch._set_threads(1)
    assert int(os.environ["OMP_NUM_THREADS"]) == os.cpu_count()
    everywhere = [*(ROOT / "torchtitan").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "train.py"]
    assert [path.name for path in everywhere if "sched_getaffinity" in path.read_text()] == ["container.py"]


needs_libgomp = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="two cores under Linux"
)


@pytest.mark.full
@needs_libgomp
def test_threads_spin_only_while_the_machine_is_quiet() -> None:
    (quiet, busy, quiet_again, busy_again), screen = seconds_spun()
    assert max(busy, busy_again) < 0.5 * max(quiet, quiet_again)
    assert screen.count("busy: ") == 1 and "waiting for a core" in screen


@pytest.mark.full
@needs_libgomp
def test_users_own_choice_stays() -> None:
    _, screen = seconds_spun(GOMP_SPINCOUNT="300000")
    assert not screen
