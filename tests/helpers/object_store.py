"""An S3 server on loopback (moto's), whose requests a test can make fail."""

import logging
import socket
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any

import pytest

BUCKET = "bucket"
LOST = 499  # as an answer: the connection is closed instead


class S3Server:
    """An S3 server with one empty bucket.

    Attributes:
        environment: variables with which a process finds the server and may use it.
        requests: method and path of all requests so far.
        fault: gets method and path of each request; an HTTP status instead of 0 is the answer to it, or `LOST`. The
            server's thread calls it, so it may also block, or kill the client.
        code: if not empty, the error that each request is refused with, such as "RequestTimeTooSkewed".
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], int] = lambda method, path: 0
        self.code = ""
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if status := self.fault(method, path):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"].read(length)  # a client that still sends would see a lost connection
            if status == LOST:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response(f"{status} Fault", [("Content-Length", "0")])
            return [b""]
        if self.code:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{self.code}</Code><Message>It is refused.</Message></Error>".encode()]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterable[S3Server]:
    """An S3 server with the bucket `bucket`, which this process and those that it starts find."""
    boto3 = pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel("ERROR")
    server = S3Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()
    from moto.core.models import DEFAULT_ACCOUNT_ID  # all servers of a process share their buckets
    from moto.s3.models import s3_backends

    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
