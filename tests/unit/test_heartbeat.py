"""How ranks meet in a store that has been used before, and how a silent rank is detected."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from workers import in_processes

from torchtitan.config.system import Comm
from torchtitan.errors import LostRankError
from torchtitan.launcher.monitor import watching, with_timeout
from torchtitan.launcher.processes import raise_limit_of_open_files
from torchtitan.logging import logger
from torchtitan.parallel import heartbeat, process_group
from torchtitan.parallel.heartbeat import Heartbeat
from torchtitan.parallel.process_group import _rendezvous, set_timeout


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        raise_limit_of_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.1.1", "leads to 127.0.1.1, where"), ("10.0.0.7", ""), (None, "no address")]
)
def test_a_name_that_leads_to_loopback_is_told_of(
    address: str | None, expected: str, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object) -> list[Any]:
        if address is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    process_group._warn_of_loopback()
    assert log == []  # one machine
    two_machines = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in two_machines.items():
        monkeypatch.setenv(name, value)
    process_group._warn_of_loopback()
    assert expected in "".join(log) and len(log) == bool(expected)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    process_group._warn_of_loopback()
    assert len(log) == bool(expected)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def in_threads(ranks: list[int], function: Callable[[int], Any]) -> dict[int, Any]:
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except LostRankError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return results


def test_each_start_of_a_run_has_a_name_of_its_own(store: Any) -> None:
    store.set("hello/1", "of a start that ended before it had met")
    names = []
    for order in ([0, 1, 2], [2, 1, 0]):
        results = in_threads(order, lambda rank: _rendezvous(store.clone(), rank, 3, seconds=20))
        assert len(set(results.values())) == 1
        names.append(results[0])
    assert names[0] != names[1]


class Watched:
    """A store whose user notes when it has seen another rank confirm."""

    def __init__(self, store: Any) -> None:
        self.store, self.has_seen_one = store, False

    def check(self, keys: list[str]) -> bool:
        found: bool = self.store.check(keys)
        self.has_seen_one |= found and "/here/" in keys[0]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_who_does_not_come_is_named_to_all(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: dict[int, Any] = {0: Watched(store.clone()), 2: store.clone()}
    # A second passes as soon as the one that comes was heard, however slow the machine is.
    clock = SimpleNamespace(monotonic=lambda: 2.0 * stores[0].has_seen_one, sleep=time.sleep)
    monkeypatch.setattr(process_group, "time", clock)
    results = in_threads([0, 2], lambda rank: _rendezvous(stores[rank], rank, 4, seconds=1))
    for error in results.values():
        assert str(error) == "of 4 ranks, these did not join within comm.init_timeout_seconds = 1: 1, 3."
    assert len(results) == 2


@pytest.mark.full
def test_a_silent_rank_is_named_before_anything_fails(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "with_timeout", lambda _, call: with_timeout(60, call))  # the store is there
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    hearts = [Heartbeat(store, rank, 3) for rank in range(3)]
    hearts[1].store.set("beat/1", "7")  # then silence
    hearts[2].end("finished")
    try:
        with watching(hearts[0]._beats(silence=1.5)):
            deadline = time.monotonic() + 120
            while not lines and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        logger.removeHandler(handler)
    assert lines == ["no heartbeat from rank 1 for 1.5 s"]
    assert hearts[2].account() == "Ranks 0 to 1 do not respond: exited, stopped, or on a machine that is down."
    assert hearts[2].has_lost_a_rank()
    hearts[1].end("stopped")
    hearts[0].end("lost contact")
    assert not hearts[2].has_lost_a_rank()
    assert hearts[2].account() == "Rank 1 was stopped by a signal."
    hearts[1].end("ValueError")
    assert hearts[2].has_lost_a_rank()
    assert hearts[2].account() == "Rank 1 failed with ValueError: see its own error message."


@pytest.mark.full
def test_a_rank_that_has_ended_beats_no_more(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a process that has several runs, one after the other, has one heartbeat."""
    monkeypatch.setattr(heartbeat, "BEAT_INTERVAL", 0.05)
    heart, other = Heartbeat(store, 0, 2), Heartbeat(store, 1, 2)
    other.store.set("beat/1", "7")
    other.store.set("end/1", "")
    heart.start()

    def beats(seconds: float) -> bool:
        before, end = heart.store.get("beat/0"), time.monotonic() + seconds
        while (beaten := heart.store.get("beat/0")) == before and time.monotonic() < end:
            time.sleep(0.05)
        return bool(beaten != before)

    assert beats(120)
    heart.end("finished")
    assert not all(beats(2) for _ in range(9))  # some may be on their way
    assert not beats(2)


def test_a_store_that_is_gone_does_not_keep_a_rank(store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_PATIENCE", 0.2)
    heart = Heartbeat(store, 1, 2)
    monkeypatch.setattr(heart, "_silent", lambda: time.sleep(1000))  # as a dead machine's
    started = time.monotonic()
    assert "rendezvous store of the run does not respond" in heart.account()
    assert time.monotonic() - started < 100
    # No other connection to it is attempted either.
    monkeypatch.setattr(process_group, "_heartbeat", heart)
    timed_out = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv to complete")
    keys = Comm(train_timeout_seconds=2, trace_buf_size=0)
    with pytest.raises(LostRankError, match=r"comm\.train_timeout_seconds = 2\. The rendezvous store of the run"):  # noqa: SIM117
        with process_group.named_failures(keys, tmp_path):
            raise timed_out


def timeouts(seconds: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns"))
    mesh["rows", "columns"]._flatten("all")
    other = dist.new_group(timeout=timedelta(seconds=77))
    set_timeout(seconds)
    groups = [dist.group.WORLD, *mesh.get_all_groups(), mesh["all"].get_group(), other]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_the_timeout_holds_for_all_groups_of_meshes_and_for_no_other() -> None:
    for result in in_processes(timeouts, 2, 33):
        assert result == [33, 33, 33, 33, 77]
