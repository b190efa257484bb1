"""A storage that cannot be reached is one line at once, before Ray starts: what, why
and what to do.
"""

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
def closed() -> str:
    """An S3 storage on a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"s3://bucket/{{}}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


@pytest.fixture(autouse=True)
def as_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first contact with a bucket be as impatient as in a job's process."""
    monkeypatch.setattr("models.storage.uri._checks_buckets", True)


@pytest.fixture
def mapping(tmp_path: Path) -> str:
    path = tmp_path / "source.yaml"
    path.write_text("files: log.csv\nuser: u\nitem: i\ntime: {column: t, unit: s}\n")
    return str(path)


LINES = (
    "prepare --source {mapping} --input {place} --output {new}/tables",
    "prepare --source {mapping} --input {raw} --output {place}",
    "audit --tables {place}",
    "tokenize --tables {place} --output {new} --tokenizer rqkmeans",
    "encode --tables {place} --output {new}",
    "train --config {sasrec} --name n --tables {new} --storage {place}",
    "sweep --grid {grid} --tables {place} --storage {new} --model.teacher {new}/teacher",
    "evaluate --checkpoint {place} --tables {new}",
)
"""Each job with a place that does not answer."""


@pytest.mark.long
def test_every_job_says_so_in_one_line_before_ray_starts(
    closed: str, mapping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("Ray is started for a storage that does not answer")

    monkeypatch.setattr(cli, "start_ray", refused)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/log.csv").write_text("u,i,t\n1,2,3\n")
    (tmp_path / "new/items").mkdir(parents=True)
    commit(
        str(tmp_path / "new/items"),
        "items",
        pa.schema([("x", pa.int64())]),
        [],
        config={},
        inputs={},
    )
    places = {
        "place": closed.format("x"),
        "new": tmp_path / "new",
        "raw": tmp_path / "raw",
        "mapping": mapping,
        "sasrec": ROOT / "jobs/configs/sasrec.yaml",
        "grid": ROOT / "tuning/grids/sid_mlp_alpha.yaml",
    }
    for line in LINES:
        job, *words = line.format(**places).split()
        module = importlib.import_module(f"jobs.{job}")
        with pytest.raises(UserError) as raised:
            module.run(cli.config_from_words(module, words))
        said = str(raised.value)
        assert said.startswith("cannot reach s3://bucket/x"), line
        assert "Could not connect" in said, line
        assert "AWS_ACCESS_KEY_ID" in said, line
        assert "\n" not in said, line


@pytest.fixture(params=[403, 404, 301, 503])
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """An address that answers every request with one status: (status, port)."""

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


@pytest.mark.long  # a request that failed is sent again a few times
def test_what_the_storage_answers_is_in_the_line(answering: tuple[int, int]) -> None:
    status, port = answering
    wanted = {
        403: "ACCESS_DENIED",
        404: "there is no bucket bucket",
        301: "located in 'eu-west-1'",
        503: "503",
    }
    with pytest.raises(UserError, match="cannot reach") as raised:
        open_uri(
            f"s3://bucket/x?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        )
    assert wanted[status] in str(raised.value) or status == 503


@pytest.mark.parametrize(
    ("uri", "wanted"),
    [
        ("s3://bucket/x?colour=red", "Unexpected query"),
        ("nowhere://host/x", "Unrecognized filesystem"),
    ],
)
def test_uris_that_are_none_are_one_line(uri: str, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        open_uri(uri)


def test_an_output_in_the_place_of_a_file_is_refused_and_nothing_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=f"cannot write to .*{tmp_path}/file is not a folder"
    ):
        check_writable(f"{tmp_path}/file/runs/a")
    check_writable(f"{tmp_path}/new/runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_are_joined_before_the_query() -> None:
    assert (
        tables.join("s3://bucket/a?region=eu", "b", "c.json")
        == "s3://bucket/a/b/c.json?region=eu"
    )
    assert tables.join("runs/a?b", "c") == "runs/a?b/c"
