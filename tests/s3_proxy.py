"""A server before a local S3 that passes requests on, refuses them with 503 or 403, or
passes them on late.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

METHODS = (b"GET", b"PUT", b"HEAD", b"POST", b"DELETE")


class S3Proxy(ThreadingTCPServer):
    """The proxy, with switches for its faults."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        address = urlsplit(target)
        self.target = (str(address.hostname), int(address.port or 80))
        self.busy_until = 0.0
        """Time, by the monotonic clock, until which requests are refused with 503."""
        self.denies = False
        """Whether requests are refused with 403."""
        self.delay_s = 0.0
        """Seconds by which requests are passed on late."""
        self.refused = 0
        """Number of refused requests."""
        self.on_request: Callable[[str, int], None] = lambda line, port: None
        """Called before a request is passed on, with its first line and the port of the
        client."""
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Connection(BaseRequestHandler):
    """One connection to the proxy."""

    server: S3Proxy

    def handle(self) -> None:
        """Pass on or refuse requests until one side closes."""
        with socket.create_connection(self.server.target) as storage:
            Thread(target=self.pass_on_answers, args=(storage,), daemon=True).start()
            while data := self.request.recv(1 << 20):
                line = data.partition(b"\r\n")[0]
                if line.startswith(METHODS):
                    port = self.client_address[1]
                    self.server.on_request(line.decode(errors="replace"), port)
                if time.monotonic() < self.server.busy_until:
                    self.refuse("503 Slow Down", SLOW_DOWN)
                    return
                if self.server.denies:
                    self.refuse("403 Forbidden", DENIED)
                    return
                time.sleep(self.server.delay_s)
                storage.sendall(data)

    def pass_on_answers(self, storage: socket.socket) -> None:
        """Send the client the answers of the storage."""
        with suppress(OSError):
            while data := storage.recv(1 << 20):
                self.request.sendall(data)

    def refuse(self, status: str, body: bytes) -> None:
        """Send an error and end the connection."""
        self.server.refused += 1
        head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/xml\r\n"
        length = f"Content-Length: {len(body)}\r\n\r\n"
        self.request.sendall(head.encode() + length.encode() + body)


@contextmanager
def s3_proxy() -> Iterator[S3Proxy]:
    """Start a proxy before the S3 of `AWS_ENDPOINT_URL` and put it in the place of that
    address.
    """
    with S3Proxy(os.environ["AWS_ENDPOINT_URL"]) as server:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ENDPOINT_URL", server.url)
            yield server
        server.shutdown()
