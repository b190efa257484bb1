"""Folders that options take are checked, and a wrong folder is rejected with its reason."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from models.storage.input_folders import require_folders
from models.storage.tables import UserError, commit


def write_empty_table(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    schema = pa.schema([("x", pa.int64())])
    commit(str(folder), name, schema, [], config={}, inputs={})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with tables, semantic IDs, text, runs and raw logs."""
    for name in ("items", "sequences"):
        write_empty_table(tmp_path / "tables" / name, name)
    write_empty_table(tmp_path / "sids/sids", "sids")
    write_empty_table(tmp_path / "text/items", "embeddings")
    for run in ("tiger", "sasrec"):
        (tmp_path / "runs" / run / "best").mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").write_text("{}")
        (tmp_path / "runs" / run / "best/config.json").write_text("{}")
    (tmp_path / "raw").mkdir()
    (tmp_path / "log.csv").write_text("a")
    return tmp_path


@pytest.mark.parametrize("is_relative", [True, False])
def test_folders_of_the_expected_kind_are_accepted(
    home: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    monkeypatch.chdir(home)
    root = Path() if is_relative else home
    require_folders(
        tables=str(root / "tables"),
        sids=str(root / "sids"),
        text=str(root / "text"),
        input=str(root / "raw"),
        checkpoint=str(root / "runs/tiger"),
        embeddings="not/there/yet",
        catalogue=None,
    )
    require_folders(checkpoint=str(root / "runs/tiger/best"))


@pytest.mark.parametrize(
    ("option", "path", "reason"),
    [
        (
            "tables",
            "table",
            "which does not exist; give a folder that jobs.prepare made",
        ),
        (
            "tables",
            "tables/items",
            "which holds no table items; give a folder that jobs.prepare made",
        ),
        (
            "catalogue",
            ".",
            "which holds no table items; give a folder that jobs.prepare made",
        ),
        ("sids", "sidz", "which does not exist; give a folder that jobs.tokenize made"),
        (
            "text",
            "tables",
            "which holds no table embeddings; give a folder that jobs.encode made",
        ),
        (
            "checkpoint",
            "runs/tigre",
            "which does not exist; give the folder of a run of jobs.train, or its checkpoint",
        ),
        (
            "checkpoint",
            "runs",
            "which holds no config.json or run.json; give the folder of a run of jobs.train, or its "
            "checkpoint",
        ),
        ("input", "rwa", "which does not exist; give the folder of a raw log"),
        ("input", "log.csv", "which is not a folder; give the folder of a raw log"),
    ],
)
def test_a_folder_of_another_kind_is_rejected_with_the_reason(
    home: Path, option: str, path: str, reason: str
) -> None:
    folder = str(home / path)
    with pytest.raises(UserError) as caught:
        require_folders(**{option: folder})
    assert str(caught.value) == f"--{option} is {folder}, {reason}"
