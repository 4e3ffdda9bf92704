"""Errors that pass are waited for, and others are not; remote rows are read at the same time."""

import errno
import http.server
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from data_helpers import TOKENIZER, close, global_batches, story, training_on
from runs import all_equal
from workers import PATIENCE

from torchtitan.config.training import Validation
from torchtitan.data import DATASETS, Document, Loader, build_loader, build_validation_loader, loader
from torchtitan.data.transient import is_transient
from torchtitan.errors import DataError

DOCUMENTS, ROWS = 60, 4


class Server:
    """An HTTP server with a document at each number.

    Attributes:
        failures: what the next requests get instead of it: a status, or 0 for a connection that is closed.
        meeting: a request takes until another one is there, once for all; None if it does not wait.
        met: whether two were there at the same time.
    """

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.requests, self.met = 0, False
        self.meeting: threading.Barrier | None = None
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                if outer.meeting is not None and not outer.met:
                    with suppress(threading.BrokenBarrierError):
                        outer.meeting.wait()
                        outer.met = True
                status = outer.failures.pop(0) if outer.failures else 200
                if status:
                    text = story(int(self.path[1:])).encode() if status == 200 else b""
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


class RemoteSource:
    """The documents of a server, by index."""

    fingerprint = "remote"

    def __init__(self, server: Server, is_remote: bool) -> None:
        self.server = server
        self.is_remote = is_remote

    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int) -> Document:
        host, port = self.server.server.server_address[:2]
        try:
            with urllib.request.urlopen(f"http://{host!s}:{port}/{index}") as response:
                return Document(response.read().decode(), str(index))
        except OSError as error:
            raise DataError(f"document {index} cannot be read ({error}).") from error


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setattr(DATASETS, "_entries", {**DATASETS._entries})
    DATASETS.register("near", lambda path, column: RemoteSource(server, is_remote=False))
    DATASETS.register("far", lambda path, column: RemoteSource(server, is_remote=True))
    monkeypatch.setattr(loader, "FIRST_PAUSE", 0.02)
    yield server
    server.server.shutdown()
    server.server.server_close()


def loader_of(dataset: str, prefetch: int = 1, **changes: object) -> Loader:
    training = training_on(None, dataset=dataset, **{"retry_seconds": 20, **changes})
    return build_loader(
        training, TOKENIZER, dp_rank=0, dp_size=1, global_batch_size=ROWS, hold_out=False, prefetch=prefetch
    )


@pytest.mark.parametrize("dataset", ["near", "far"])
@pytest.mark.parametrize("failures", [[0], [503, 0, 429], [500] * 5])
def test_a_hiccup_changes_no_batch(dataset: str, failures: list[int], server: Server, log: list[str]) -> None:
    plain = loader_of("near")
    expected = global_batches([plain], 12)
    close([plain])
    loader = loader_of(dataset)
    got = global_batches([loader], 4)
    server.failures += failures
    got += global_batches([loader], 8)
    close([loader])
    assert all_equal(got, expected) and not server.failures
    warnings = [line for line in log if "Reading again in" in line]
    assert len(warnings) >= (1 if dataset == "far" else len(failures)) and "cannot be read" in warnings[0]
    assert not loader.retrying


@pytest.mark.parametrize("status", [403, 404])
def test_what_does_not_pass_ends_at_once(status: int, server: Server, log: list[str]) -> None:
    loader = loader_of("near")
    global_batches([loader], 2)
    server.failures += [status]
    with pytest.raises(DataError, match=rf"cannot be read \(HTTP Error {status}"):
        global_batches([loader], 8)
    assert not any("Reading again" in line for line in log)


@pytest.mark.parametrize("seconds", [0, 1])
def test_the_time_for_reading_again_is_limited_and_the_run_can_resume(seconds: int, server: Server) -> None:
    loader = loader_of("near", retry_seconds=seconds)
    plain = global_batches([loader_of("near")], 12)
    global_batches([loader], 3)
    server.failures += [503] * 10_000
    given = 3
    with pytest.raises(DataError, match="503"):
        while True:
            global_batches([loader], 1)
            given += 1
    server.failures.clear()
    again = loader_of("near")
    again.load_state_dict(loader.state_dict())
    assert all_equal(global_batches([again], 12 - given), plain[given:])
    close([again])


@pytest.mark.parametrize("steps", [3, -1])
def test_validation_reads_again_too(steps: int, server: Server) -> None:
    def batches() -> list[object]:
        validation = Validation(enabled=True, dataset="near", local_batch_size=2, steps=steps)
        training = training_on(None, dataset="near")
        loader = build_validation_loader(validation, training, TOKENIZER, dp_rank=0, dp_size=1, retry_seconds=20)
        return [batch.tokens.tolist() for batch in loader]

    expected = batches()
    server.failures += [200, 0, 503]
    assert batches() == expected and not server.failures


def of_store(status: int, error: OSError) -> OSError:
    """As fsspec raises it from the error of its library, which has the status."""
    from botocore.exceptions import ClientError

    answer: Any = {"Error": {"Code": "Some"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = ClientError(answer, "GetObject")
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError("timed out"), True),
        (OSError(errno.EIO, "input/output error"), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (OSError(errno.ENOSPC, "no space"), False),
        (EOFError("the file ends within a frame"), False),
        (ValueError("not JSON"), False),
        (urllib.error.HTTPError("http://a", 503, "", {}, None), True),  # type: ignore[arg-type]
        (urllib.error.HTTPError("http://a", 404, "", {}, None), False),  # type: ignore[arg-type]
        (of_store(503, OSError(errno.EBUSY, "slow down")), True),
        (of_store(400, OSError(errno.EIO, "bad request")), False),
        (of_store(403, PermissionError(errno.EACCES, "denied")), False),
    ],
)
def test_which_errors_pass(error: Exception, passes: bool) -> None:
    try:
        raise DataError("it cannot be read.") from error
    except DataError as raised:
        assert is_transient(raised) == passes


def test_rows_of_a_remote_source_are_read_at_the_same_time(server: Server) -> None:
    near, far = (global_batches([loader_of(dataset)], 12) for dataset in ("near", "far"))
    assert all_equal(near, far)
    server.meeting = threading.Barrier(ROWS, timeout=60)
    loader = loader_of("far")
    global_batches([loader], 1)
    close([loader])
    assert server.met


@pytest.mark.full
def test_a_process_ends_while_remote_rows_are_read(tmp_path: Path) -> None:
    program = """
        import time
        from torchtitan.config.training import Training
        from torchtitan.data import DATASETS, Document, build_loader, load_tokenizer
        class Slow:
            fingerprint, is_remote = "", True
            def __len__(self): return 100
            def __getitem__(self, index): time.sleep(0 if index % 3 else 600); return Document("a b c " * 100, "")
        DATASETS.register("slow", lambda path, column: Slow())
        training = Training(dataset="slow", seq_len=64, local_batch_size=8)
        build_loader(training, load_tokenizer(None), dp_rank=0, dp_size=1, global_batch_size=8, hold_out=False)
        time.sleep(0.3)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)  # sooner than a document comes
    assert (ended.returncode, ended.stderr) == (0, "")
