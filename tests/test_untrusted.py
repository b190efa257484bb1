"""Test that data from others gets no more than its own content (SECURITY.md)."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import UserError
from core.ids import clean_id, parse_item_id
from core.options import build, refuse_secrets
from core.schemas import RunRecord, RunRef
from core.tables import read_parquet
from jobs.cli import mask_controls
from models.dataset.dataset import cache_folder, open_columns
from models.retrieval.sasrec import SASRec
from models.training.checkpoint import Checkpoint
from pipelines.comparison.tables import to_markdown
from pipelines.evaluation.result import choose_store
from pipelines.prepare.reading.read import parse_sql
from pipelines.serving import package
from pipelines.start import join_cluster
from pipelines.tracking import connect
from pipelines.training.config import TrainConfig
from pipelines.training.record import read_record
from tests.fixtures.training_tables import write_table


def test_an_id_of_many_blanks_takes_time_in_proportion_to_its_length():
    start = time.process_time()
    assert clean_id("a" + " " * 1_000_000 + "b\u2003 ") == "a" + " " * 1_000_000 + "b"
    assert time.process_time() - start < 1


@pytest.mark.parametrize("text", ["1e+1000000000", "1.5e999", "1e+" + "9" * 40])
def test_large_exponents_are_not_written_out(text):
    assert clean_id(text) == text


def test_served_ids_have_at_most_1000_characters():
    assert parse_item_id("a" * 1000) == "a" * 1000
    with pytest.raises(ValueError, match="1,001 characters"):
        parse_item_id("a" * 1001)


class _Pickled(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.binary(), "test.pickled_object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(
        cls, storage: pa.DataType, serialized: bytes
    ) -> _Pickled:
        return cls()


@pytest.mark.parametrize("is_nested", [False, True])
def test_extension_types_are_refused(is_nested, tmp_path):
    pa.register_extension_type(_Pickled())
    try:
        column = pa.ExtensionArray.from_storage(_Pickled(), pa.array([b"x"]))
        values = pa.ListArray.from_arrays([0, 1], column) if is_nested else column
        pq.write_table(pa.table({"text_title": values}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match="column text_title"):
            read_parquet(str(tmp_path / "a.parquet"))
    finally:
        pa.unregister_extension_type("test.pickled_object")


def test_parquet_is_only_read_with_a_check_of_its_types():
    root = Path(package.__file__).parents[2]
    for folder in ("core", "models", "pipelines", "jobs", "tuning"):
        for path in (root / folder).rglob("*.py"):
            source = path.read_text()
            assert "pq.read_table(" not in source, path
            readers = source.count("pq.ParquetFile(")
            assert readers <= source.count("    check_plain_types("), path


@pytest.mark.parametrize(
    "text",
    [
        "x in (select a from read_csv('/etc/passwd'))",
        "x in (from READ_CSV('/etc/passwd'))",
        "x in (from \"read_parquet\"('http://127.0.0.1/'))",
    ],
)
def test_sql_of_a_mapping_opens_no_file(text):
    with pytest.raises(ValueError, match=r"(?i)calls read_"):
        parse_sql(text)


@pytest.mark.parametrize(
    "text",
    [
        "lpad(x, 2000000000, 'x')",
        "RPAD (x, 2000000000)",
        "\"lpad\"(x, y, 'x')",
        "upper(lpad(x, 999 * 999 * 999, 'x'))",
        "'lpad(x, 3)' || lpad(x, 1000)",
        "generate_series(1, 2000000000)",
        "range(1, x)",
    ],
)
def test_sql_of_a_mapping_makes_no_values_of_unlimited_length(text):
    with pytest.raises(ValueError, match="unlimited length"):
        parse_sql(text)


def test_sql_of_a_mapping_pads_to_a_width():
    frame = pl.DataFrame({"range": ["7"]})
    expression = parse_sql("lpad(lpad(range, 3, 'x'), 4, '0')")
    assert frame.select(expression)["range"].to_list() == ["0xx7"]


def test_sql_of_a_mapping_reads_columns():
    frame = pl.DataFrame({"read_time": [1], "read csv": [2]})
    expression = parse_sql('read_time + "read csv"')
    assert frame.select(expression.alias("sum"))["sum"].to_list() == [3]


def test_a_store_that_only_a_checkpoint_names_is_not_contacted(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stranger = {"uri": "http://stranger", "experiment": "x", "run_id": "0"}
    evaluated = Checkpoint({"name": "sasrec"}, tracking=stranger)
    folder = str(tmp_path / "runs/sasrec/best")
    assert choose_store(folder, evaluated, None) == ""
    assert choose_store(folder, evaluated, "http://mine") == "http://mine"
    for name, artifacts, is_used in (
        ("runs/mlflow.db", f"file://{tmp_path}/artifacts", True),
        ("mlflow.db", "http://stranger", False),
        ("other/mlflow.db", f"file://{tmp_path}/artifacts", False),
    ):
        uri = f"sqlite:///{tmp_path}/{name}"
        client = connect(uri)
        experiment = client.create_experiment("x", artifact_location=artifacts)
        run_id = client.create_run(experiment).info.run_id
        local = replace(evaluated, tracking={**stranger, "uri": uri, "run_id": run_id})
        assert bool(choose_store(folder, local, None)) == is_used
    record = RunRecord(status="running", run=RunRef(**stranger))
    (tmp_path / "run.json").write_text(json.dumps(asdict(record)))
    assert "stranger" not in str(read_record(str(tmp_path), "http://mine"))


@pytest.mark.parametrize(
    "uri",
    [
        "http://user:SECRET@host:5000",
        "postgresql://SECRET@host/db",
        "s3://bucket/x?region=eu&secret_key=SECRET",
        "https://host/x?X-Amz-Signature=SECRET",
        "postgresql://user:a/SECRET@host/db",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_printed(uri):
    for refuse in (
        lambda: build(TrainConfig, {"tracking_uri": uri}),
        lambda: build(TrainConfig, {"model": {"name": "tiger", "teacher": uri}}),
        lambda: connect(uri),
    ):
        with pytest.raises(UserError, match="password or key") as error:
            refuse()
        assert "SECRET" not in str(error.value)
    with pytest.raises(UserError, match="RAY_ADDRESS has an address"):
        join_cluster("user:a/SECRET@host:6379")


@pytest.mark.parametrize(
    "uri", ["gs://anonymous@bucket/a", "s3://b/a@2024/x?region=eu", "http://host:5000"]
)
def test_an_address_without_a_password_is_accepted(uri):
    refuse_secrets({"ndcg@10": [uri, "ndcg@10"]}, "an option")


def test_credentials_of_a_server_are_removed_where_the_store_is_a_file(
    tmp_path, monkeypatch
):
    names = [f"MLFLOW_TRACKING_{key}" for key in ("USERNAME", "PASSWORD", "TOKEN")]
    for name in names:
        monkeypatch.setenv(name, "mine")
    with pytest.raises(UserError, match="cannot reach MLflow"):
        connect("http://127.0.0.1:9")
    assert all(name in os.environ for name in names)
    connect(f"sqlite:///{tmp_path}/mlflow.db")
    assert not any(name in os.environ for name in names)


def test_names_cannot_steer_a_terminal_or_a_page():
    name = "a\x1b[2J\x9b31m<img src=x>|\n[l](javascript:x) 日"
    stream = io.StringIO()
    mask_controls(stream)
    print(name, file=stream)
    assert stream.getvalue().startswith("a?[2J?31m<img src=x>|\n")
    frame = pl.DataFrame({"run": [name], name: ["1"]})
    text = to_markdown((name, frame, [name]))
    assert "<img" not in text
    assert "](" not in text
    assert len(text.splitlines()) == 7


def test_make_runs_no_code_of_its_variables(tmp_path):
    root = Path(package.__file__).parents[2]
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(root / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "[%s]" "$@"')
    python.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    for value in ("x'; touch made; '", "$(shell touch made)", '"; touch made; "'):
        result = subprocess.run(
            ["make", "-s", "quickstart", f"DATA={value}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.stdout == f"[-m][jobs.quickstart][--data][{value}]"
        subprocess.run(
            ["make", "test-ray", f"RAY=1; {value}"], cwd=tmp_path, capture_output=True
        )
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("file", "requirement"),
    [
        ("encoder/model/config.json", "sentence-transformers"),
        ("encoder/tfidf.safetensors", "scikit-learn"),
    ],
)
def test_a_served_model_requires_the_library_of_its_encoder(
    file, requirement, tmp_path
):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    *_, last = package.pin_requirements(SASRec, tmp_path)
    assert last.startswith(f"{requirement}==")


def test_the_cache_removes_only_its_own_entries(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIELINE_CACHE", str(tmp_path / "cache"))
    cache_folder().mkdir(parents=True)
    foreign = [tmp_path / "cache" / "notes.txt", cache_folder() / "thesis.tex"]
    for path in foreign:
        path.write_text("mine")
    old = cache_folder() / f"layout-{'0' * 32}"
    old.mkdir()
    for path in (*foreign, old):
        os.utime(path, (0, 0))
    rows = pa.table({"item_index": [0]})
    table = write_table(str(tmp_path / "table"), "items", rows, {}, {})
    open_columns(table, "layout", None, lambda part: {"item": np.zeros(1)})
    assert all(path.exists() for path in foreign)
    assert not old.exists()


def test_the_cache_is_readable_by_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIELINE_CACHE", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        rows = pa.table({"item_index": [0]})
        table = write_table(str(tmp_path / "table"), "items", rows, {}, {})
        open_columns(table, "layout", None, lambda part: {"item": np.zeros(1)})
    finally:
        os.umask(before)
    assert cache_folder().stat().st_mode & 0o077 == 0
    assert cache_folder().parent.stat().st_mode & 0o077 == 0
