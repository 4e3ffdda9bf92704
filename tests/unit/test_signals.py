"""Signals to a process whose main thread, or output reader, does not respond. Without torch: fast to start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import ROOT
from workers import PATIENCE

BEGINNING = """
import ctypes, sys, time
from torchtitan.launcher import signals
from torchtitan.logging import ignore_broken_pipes

def native_call():  # as a GEMM that takes minutes: back in Python only when it is done, and no signal interrupts it
    print('ready', flush=True)
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

ignore_broken_pipes()
signals.GRACE = 0.4
stop = signals.Stop()
stop.listen()
"""
FIRST_STEP = "stop.progress.begins(); native_call()"
THIRD_STEP = """
for seconds in (5, 0.3):
    stop.progress.begins()
    stop.progress.began -= seconds
    stop.progress.ends()
stop.progress.begins(); native_call()
"""
VALIDATION = "stop.progress.begins(); stop.progress.ends(); native_call()"
FAILED = "stop.failed = 2; native_call()"  # as a rank that leaves it to rank 0 to report an error
LAST_WORDS = """
import atexit
signals.ignore_stop_signals()
atexit.register(time.sleep, 0.5)
print('ready', flush=True)
"""
TO_A_BOUNDARY = """
signals.GRACE = 100  # the next line is printed long before, however busy the machine is
print('ready', flush=True)
while not stop.requested:
    print('a line of the log')
    time.sleep(0.01)
stop.agreed_on = stop.requested
for _ in range(1000):
    print('saved ' * 1000)
sys.exit(7)
"""
TWO_STEPS = """
stop.step_on_disk = lambda: 2
for _ in range(2):
    stop.progress.begins(); stop.progress.ends()
signals.GRACE = 100
# Half a second passes where a file says so, so that no pause between two signals is too long on a busy machine.
from pathlib import Path
signals.time = type('', (), {'monotonic': lambda: 1.0 + 0.6 * Path(sys.argv[1]).exists()})
stop.progress.begins(); native_call()
"""
OUTPUT_THAT_NOBODY_READS = "print('ready', flush=True)\nwhile True: print('a line ' * 1000, flush=True)"


@contextmanager
def ready(
    script: str, *arguments: object, before: Callable[[], object] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The script, once it has printed "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGINNING + script, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=before or (lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)),  # the tests may run under nohup
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("script", "number", "status", "words"),
    [
        (FIRST_STEP, signal.SIGINT, 130, "Stopped by SIGINT"),
        (FIRST_STEP, signal.SIGTERM, 0, "Stopped by SIGTERM before the first step finished"),
        (THIRD_STEP, signal.SIGINT, 130, "Stopped by SIGINT during a step that does not end"),
        (THIRD_STEP, signal.SIGUSR1, 128 + signal.SIGUSR1, "during a step that does not end"),
        (FAILED, signal.SIGTERM, 2, "Stopped by SIGTERM"),
        (LAST_WORDS, signal.SIGINT, 0, ""),
        (LAST_WORDS, signal.SIGTERM, 0, ""),  # everything is saved, and the interpreter is exiting
    ],
)
def test_a_long_native_call_does_not_keep_a_signal(
    script: str, number: int, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "stopped"
    monkeypatch.setenv("TORCHTITAN_STOPPED", str(mark))
    with ready(script) as process:
        started = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        assert words in output
        assert "Traceback" not in output
        given_up = "first step finished" in words or "does not end" in words
        assert (mark.read_text() if mark.exists() else "") == ("0\n" if given_up else "")
        if script == THIRD_STEP:  # the grace period, plus the time of a step except the first
            assert time.monotonic() - started > 0.7


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_ends_at_once(first: int, tmp_path: Path) -> None:
    later = tmp_path / "later"
    on_disk = "The checkpoint of step 2 is on disk, and the same command resumes from it.\n"
    with ready(TWO_STEPS, later) as process:
        assert process.stdout is not None
        process.send_signal(first)
        assert process.stdout.readline() == "\n"
        assert process.stdout.readline().endswith(on_disk)
        process.send_signal(first)  # as torchrun passes on what the terminal has sent already
        time.sleep(0.5)
        assert process.poll() is None
        later.touch()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE)[0] == f"\nStopped by SIGINT. {on_disk}"
        assert process.returncode == 130


def test_a_ctrl_c_during_the_start_goes_before_the_sigterm_of_the_launcher() -> None:
    script = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as the launcher does
os.kill(os.getpid(), signal.SIGINT)
from torchtitan.launcher import signals
set_handler = signal.signal

def signal_follows(number, handler):
    set_handler(number, handler)
    if number == signal.SIGTERM:
        os.kill(os.getpid(), number)

signal.signal = signal_follows
signals.Stop().listen()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
time.sleep(200)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr.strip().count("\n")) == (130, 0)
    assert "Stopped by SIGINT" in run.stderr


def test_a_validation_or_a_save_may_take_its_time() -> None:
    with ready(VALIDATION) as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_reader_that_is_gone_changes_nothing(number: int) -> None:
    with ready(TO_A_BOUNDARY) as process:
        assert process.stdout is not None
        process.stdout.close()
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 7


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_reader_that_has_stopped_reading_does_not_keep_a_signal(number: int, status: int) -> None:
    with ready(OUTPUT_THAT_NOBODY_READS) as process:
        time.sleep(0.2)  # the pipe is full
        process.send_signal(number)
        assert process.wait(PATIENCE) == status


def test_a_full_disk_under_the_log_changes_nothing() -> None:
    script = BEGINNING + "print('lost', flush=True); print('lost too')"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=full).returncode == 0


def test_nohup_is_respected() -> None:
    with ready(TO_A_BOUNDARY, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


def test_the_whole_stack_is_shown_though_no_python_runs() -> None:
    script = "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR2)\n" + FIRST_STEP
    with ready(script.replace("CDLL", "PyDLL")) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR2)
        assert any("in native_call" in process.stdout.readline() for _ in range(20))
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
