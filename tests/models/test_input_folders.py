"""What a folder that an option takes is answered with where it is another one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from models.storage.input_folders import require_folders
from models.storage.tables import UserError, commit


def table(place: Path, name: str) -> None:
    place.mkdir(parents=True)
    commit(str(place), name, pa.schema([("x", pa.int64())]), [], config={}, inputs={})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for folder in ("items", "sequences"):
        table(tmp_path / "tables" / folder, folder)
    table(tmp_path / "sids/sids", "sids")
    table(tmp_path / "text/items", "embeddings")
    for run in ("tiger", "sasrec"):
        (tmp_path / "runs" / run / "best").mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").write_text("{}")
        (tmp_path / "runs" / run / "best/config.json").write_text("{}")
    (tmp_path / "raw").mkdir()
    (tmp_path / "log.csv").write_text("a")
    return tmp_path


def test_what_each_option_takes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for root in (Path(), home):
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
    ("option", "place", "why"),
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
def test_another_folder(home: Path, option: str, place: str, why: str) -> None:
    given = str(home / place)
    with pytest.raises(UserError) as caught:
        require_folders(**{option: given})
    assert str(caught.value) == f"--{option} is {given}, {why}"
