"""The sockets that a run's processes listen on: with one machine, none that other machines can reach."""

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from runs import TINY, into, last_step, started

LISTEN = "0A"


def listening_on(pid: int) -> list[str]:
    """The addresses of a process's listening TCP sockets."""
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(os.readlink(descriptor))
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return [
        address(fields[1].partition(":")[0])
        for fields in map(str.split, lines)
        if fields[3] == LISTEN and f"socket:[{fields[9]}]" in targets
    ]


def address(digits: str) -> str:
    """Decodes Linux's hexadecimal digits: words of four bytes, least significant byte first."""
    words = [bytes.fromhex(word)[::-1] for word in re.findall(".{8}", digits)]
    return str(ipaddress.ip_address(b"".join(words)))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_on_one_machine_listens_on_loopback_alone(processes: int, tmp_path: Path) -> None:
    with started(*TINY, "--training.steps=100000", into(tmp_path), processes=processes) as run:
        run.wait_until(lambda: last_step(tmp_path) >= 2)
        addresses = {pid: listening_on(pid) for pid in run.pids()}
    assert addresses.get(run.process.pid), "the launcher has no store"
    assert {host for of_process in addresses.values() for host in of_process} <= {"127.0.0.1", "::1"}
