"""A storage that hesitates: S3 answers 503 for half a minute, or sends its first byte late; and what is permanent."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest

from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import file_info, read_json, write_file
from models.training.fit import FitConfig
from pipelines.training.run import train
from pipelines.training.settings import RayOptions

pytestmark = pytest.mark.long

MODEL = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}
FIT = {"batch_size": 8, "max_epochs": 3, "patience": 0, "seed": 3}

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Proxy(ThreadingTCPServer):
    """A server before S3 that passes on what it gets, refuses it with 503 or 403, or passes it on late."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        address = urlsplit(target)
        self.target = (str(address.hostname), int(address.port or 80))
        self.busy_until = 0.0
        self.denies = False
        self.delay_s = 0.0
        self.refused = 0
        Thread(target=self.serve_forever, daemon=True).start()


class Connection(BaseRequestHandler):
    """One connection to the proxy."""

    server: Proxy

    def handle(self) -> None:
        """Pass on or refuse what comes, until one side closes."""
        with socket.create_connection(self.server.target) as storage:
            Thread(target=self.pass_on_answers, args=(storage,), daemon=True).start()
            while data := self.request.recv(1 << 20):
                if time.monotonic() < self.server.busy_until:
                    return self.refuse("503 Slow Down", SLOW_DOWN)
                if self.server.denies:
                    return self.refuse("403 Forbidden", DENIED)
                time.sleep(self.server.delay_s)
                storage.sendall(data)

    def pass_on_answers(self, storage: socket.socket) -> None:
        """Send the client what the storage answers."""
        with suppress(OSError):
            while data := storage.recv(1 << 20):
                self.request.sendall(data)

    def refuse(self, status: str, body: bytes) -> None:
        """Send an error and end the connection."""
        self.server.refused += 1
        head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/xml\r\n"
        length = f"Content-Length: {len(body)}\r\n\r\n"
        self.request.sendall(head.encode() + length.encode() + body)


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(os.environ["AWS_ENDPOINT_URL"]) as server:
        monkeypatch.setenv(
            "AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}"
        )
        yield server
        server.shutdown()


def test_a_training_outlives_half_a_minute_of_503(
    proxy: Proxy,
    s3: str,
    small: tuple[str, str],
    tmp_path: Path,
    new_store: Callable[[Path], str],
) -> None:
    def refuse_from_now_on(about: Checkpoint) -> None:
        if about.epoch == 1:
            proxy.busy_until = time.monotonic() + 30

    trained = train(
        model=MODEL,
        fit=FitConfig(**FIT),
        ray_options=RayOptions(threads=1),
        inputs=Inputs(small[0]),
        storage=f"{s3}/runs",
        name="one",
        tracking_uri=new_store(tmp_path),
        log_model=False,
        say=lambda line: None,
        heard=refuse_from_now_on,
    )

    assert trained.epochs == FIT["max_epochs"]
    assert proxy.refused > 2
    assert time.monotonic() > proxy.busy_until


def test_a_late_first_byte_is_waited_for(proxy: Proxy, s3: str) -> None:
    proxy.delay_s = 5.0

    write_file(f"{s3}/late.json", b'{"value": 1}')

    assert read_json(f"{s3}/late.json") == {"value": 1}


def test_what_is_forbidden_is_one_line_at_once(proxy: Proxy, s3: str) -> None:
    proxy.denies = True
    began = time.monotonic()

    with pytest.raises(UserError, match=r"cannot reach .*ACCESS_DENIED") as caught:
        file_info(f"{s3}/forbidden")

    assert "\n" not in str(caught.value)
    assert proxy.refused == 1
    assert time.monotonic() - began < 60
