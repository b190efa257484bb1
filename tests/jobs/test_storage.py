"""A storage that cannot be reached is one line at once, before Ray starts: what, why and what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from jobs import audit, cli, encode, evaluate, prepare, sweep, tokenize, train
from models import tables
from models.tables import UserError, commit, open_uri
from models.uri import check_writable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def closed() -> str:
    """An S3 storage on a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"s3://bucket/{{}}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


@pytest.fixture
def mapping(tmp_path: Path) -> str:
    path = tmp_path / "source.yaml"
    path.write_text("files: log.csv\nuser: u\nitem: i\ntime: {column: t, unit: s}\n")
    return str(path)


def lines(where: str, mapping: str, folder: Path) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """Each job with its options, one of them a place that does not answer."""
    place, here, raw = where.format("x"), str(folder / "new"), str(folder / "raw")
    config = str(ROOT / "jobs/configs/sasrec.yaml")
    grid = str(ROOT / "tuning/grids/sid_mlp_alpha.yaml")
    fit = ["--config", config, "--name", "n"]
    return {
        "prepare from": (prepare.run, prepare.Config(mapping, place, f"{here}/tables")),
        "prepare to": (prepare.run, prepare.Config(mapping, raw, place)),
        "prepare by": (prepare.run, prepare.Config(place, raw, f"{here}/tables")),
        "audit": (audit.run, audit.Config(place)),
        "tokenize": (tokenize.run, tokenize.parse("tokenize", words(place, here, "--tokenizer", "rqkmeans"))),
        "tokenize to": (tokenize.run, tokenize.parse("tokenize", words(here, place, "--tokenizer", "rqkmeans"))),
        "encode": (encode.run, encode.parse("encode", words(place, here))),
        "encode to": (encode.run, encode.parse("encode", words(here, place))),
        "train": (train.run, train.parse("train", [*fit, "--tables", place, "--storage", here])),
        "train to": (train.run, train.parse("train", [*fit, "--tables", here, "--storage", place])),
        "sweep": (
            sweep.run,
            sweep.parse(
                "sweep", ["--grid", grid, "--tables", place, "--storage", here, "--model.teacher", f"{here}/teacher"]
            ),
        ),
        "evaluate": (evaluate.run, evaluate.Config(checkpoint=place, tables=here)),
        "evaluate on": (evaluate.run, evaluate.Config(checkpoint=here, tables=place)),
    }


def words(tables: str, output: str, *more: str) -> list[str]:
    return ["--tables", tables, "--output", output, *more]


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
    commit(str(tmp_path / "new/items"), "items", pa.schema([("x", pa.int64())]), [], config={}, inputs={})
    for name, (run, config) in lines(closed, mapping, tmp_path).items():
        with pytest.raises(UserError) as raised:
            run(config)
        said = str(raised.value)
        assert said.startswith("cannot reach s3://bucket/x"), name
        assert "Could not connect" in said, name
        assert "AWS_ACCESS_KEY_ID" in said, name
        assert "\n" not in said, name


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
    wanted = {403: "ACCESS_DENIED", 404: "there is no bucket bucket", 301: "located in 'eu-west-1'", 503: "503"}
    with pytest.raises(UserError, match="cannot reach") as raised:
        open_uri(f"s3://bucket/x?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1")
    assert wanted[status] in str(raised.value) or status == 503


@pytest.mark.parametrize(
    ("uri", "wanted"),
    [("s3://bucket/x?colour=red", "Unexpected query"), ("nowhere://host/x", "Unrecognized filesystem")],
)
def test_uris_that_are_none_are_one_line(uri: str, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        open_uri(uri)


def test_an_output_in_the_place_of_a_file_is_refused_and_nothing_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot write to .*{tmp_path}/file is no folder"):
        check_writable(f"{tmp_path}/file/runs/a")
    check_writable(f"{tmp_path}/new/runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_are_joined_before_the_query() -> None:
    assert tables.join("s3://bucket/a?region=eu", "b", "c.json") == "s3://bucket/a/b/c.json?region=eu"
    assert tables.join("runs/a?b", "c") == "runs/a?b/c"
