"""Test that an unreachable storage is reported in one line before Ray starts."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from jobs import cli
from models.storage import tables
from models.storage.tables import UserError, commit, open_uri
from models.storage.uri import check_writable

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unreachable() -> str:
    """Return the URI of an S3 storage without a server, with {} for the path."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    return f"s3://bucket/{{}}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


@pytest.fixture(autouse=True)
def check_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first contact with a bucket time out as early as in a job's process."""
    monkeypatch.setattr("models.storage.uri._checks_buckets", True)


@pytest.fixture
def mapping(tmp_path: Path) -> str:
    """Write the mapping of a CSV log; return its path."""
    path = tmp_path / "source.yaml"
    path.write_text("files: log.csv\nuser: u\nitem: i\ntime: {column: t, unit: s}\n")
    return str(path)


COMMANDS = (
    "prepare --source {mapping} --input {unreachable} --output {new}/tables",
    "prepare --source {mapping} --input {raw} --output {unreachable}",
    "audit --tables {unreachable}",
    "tokenize --tables {unreachable} --output {new} --tokenizer rqkmeans",
    "encode --tables {unreachable} --output {new}",
    "train --config {sasrec} --name n --tables {new} --storage {unreachable}",
    "sweep --grid {grid} --tables {unreachable} --storage {new} --model.teacher {new}/teacher",
    "evaluate --checkpoint {unreachable} --tables {new}",
)
"""Jobs that read or write an unreachable storage."""


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_every_job_reports_an_unreachable_storage_before_ray_starts(
    command: str,
    unreachable: str,
    mapping: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("Ray is started for a storage that does not answer")

    monkeypatch.setattr(cli, "start_ray", fail)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/log.csv").write_text("u,i,t\n1,2,3\n")
    items = tmp_path / "new/items"
    items.mkdir(parents=True)
    schema = pa.schema([("x", pa.int64())])
    commit(str(items), "items", schema, [], config={}, inputs={})
    paths = {
        "unreachable": unreachable.format("x"),
        "new": tmp_path / "new",
        "raw": tmp_path / "raw",
        "mapping": mapping,
        "sasrec": ROOT / "jobs/configs/sasrec.yaml",
        "grid": ROOT / "tuning/grids/sid_mlp_alpha.yaml",
    }
    job, *words = command.format(**paths).split()
    module = importlib.import_module(f"jobs.{job}")

    with pytest.raises(UserError) as raised:
        module.run(cli.config_from_words(module, words))

    message = str(raised.value)
    assert message.startswith("cannot reach s3://bucket/x")
    assert "Could not connect" in message
    assert "AWS_ACCESS_KEY_ID" in message
    assert "\n" not in message


@pytest.fixture(params=[403, 404, 301, 503])
def status_server(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Start a server that answers every request with one status.

    Yields:
        The status and the server's port.
    """

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(request.param)
            self.send_header("x-amz-bucket-region", "eu-west-1")
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield request.param, server.server_port
        server.shutdown()


@pytest.mark.long  # a failed request is repeated a few times
def test_the_error_names_the_storages_answer(status_server: tuple[int, int]) -> None:
    status, port = status_server
    reasons = {
        403: "ACCESS_DENIED",
        404: "there is no bucket bucket",
        301: "located in 'eu-west-1'",
        503: "503",
    }
    server = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"

    with pytest.raises(UserError, match="cannot reach") as raised:
        open_uri(f"s3://bucket/x?{server}")

    assert reasons[status] in str(raised.value) or status == 503


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://bucket/x?colour=red", "Unexpected query"),
        ("nowhere://host/x", "Unrecognized filesystem"),
    ],
)
def test_an_invalid_uri_is_refused(uri: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_uri(uri)


def test_an_output_below_a_file_is_refused_and_no_folder_created(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=f"cannot write to .*{tmp_path}/file is not a folder"
    ):
        check_writable(f"{tmp_path}/file/runs/a")
    check_writable(f"{tmp_path}/new/runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_paths_are_joined_before_the_query_of_a_uri() -> None:
    assert (
        tables.join("s3://bucket/a?region=eu", "b", "c.json")
        == "s3://bucket/a/b/c.json?region=eu"
    )
    assert tables.join("runs/a?b", "c") == "runs/a?b/c"
