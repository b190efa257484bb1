"""`prepare` of a raw log of actions: the tables it writes and the inputs it rejects."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from core.tables import read_manifest
from models.actions.requests import ACTIONS
from pipelines.prepare.audit.rules import audit
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import load_source
from tests.fixtures.commands import load_split, read_config, read_rows

START = 1_600_000_000_000
SOURCE = {
    "files": "log_standard*.csv*",
    "user": "u",
    "item": "i",
    "time": {"column": "t", "unit": "ms"},
    "labels": {
        "click": {"column": "click"},
        "like": {"column": "like"},
        "never": {"column": "never"},
        "rating": {"column": "rating", "type": "float32", "range": [0.5, 5]},
    },
    "items": {
        "files": "items.csv",
        "item": "i",
        "attributes": {"author": "a"},
        "numbers": {"length": "s"},
    },
    "prepare": {
        "kind": "actions",
        "core": 0,
        "split": {
            "by": "temporal",
            "val_start": START + 20,
            "test_start": START + 30,
        },
        "max_rejects": 1,
        "actions": {
            "tasks": {"liked": {"label": "rating", "at_least": 4}},
            "inputs": {"rating": {"label": "rating"}},
            "counts": {
                "keys": ["item", "author", "user"],
                "windows_days": [1],
                "delay_minutes": 0,
            },
        },
    },
}

USERS = {"files": "users.csv", "user": "id", "attributes": {"age": "age"}}

LOG = [
    "u,i,t,click,like,never,rating",
    "old,a,1600000000001,1,0,0,4.5",
    "old,b,1600000000002,0,0,0,1",
    "old,a,1600000000003,1,1,0,2",
    "old,b,1600000000025,0,1,0,",
    "new,a,1600000000031,1,0,0,5",  # a user with candidates and no context
    "new,b,1600000000032,0,0,0,3",
    "old,a,1600000000040,1,0,0,4",
]


def write_raw_log(
    folder: Path,
    lines: list[str],
    gzip_files: dict[str, list[str]] | None = None,
    **source: Any,
) -> tuple[Any, dict, str]:
    """Write a raw log and load its source.

    Args:
        folder: A new folder for the raw files and `source.yaml`.
        lines: Lines of the first file, with its header.
        gzip_files: Lines of further files without their header, by name.
        source: Keys of the source that replace or extend `SOURCE`.

    Returns:
        The source, its `prepare` section, and the folder.
    """
    folder.mkdir()
    (folder / "log_standard_1.csv").write_text("\n".join(lines) + "\n")
    for name, content in (gzip_files or {}).items():
        text = "\n".join([LOG[0], *content]) + "\n"
        (folder / name).write_bytes(gzip.compress(text.encode()))
    (folder / "items.csv").write_text("i,a,s\na,x,1.5\nb,,\n")
    (folder / "users.csv").write_text("id,age\nold,70\nnew,20\nold,7\n")
    (folder / "source.yaml").write_text(yaml.safe_dump({**SOURCE, **source}))
    return *load_source(str(folder / "source.yaml")), str(folder)


def prepare_log(
    folder: Path,
    lines: list[str],
    *layers: dict,
    gzip_files: dict | None = None,
    **source: Any,
) -> tuple[str, list[str]]:
    """Prepare a raw log; return its tables and the reported lines."""
    log_source, defaults, raw = write_raw_log(
        folder / "raw", lines, gzip_files, **source
    )
    tables = str(folder / "tables")
    reported: list[str] = []
    config = read_config(defaults, *layers)
    prepare(log_source, raw, tables, config, report=reported.append)
    return tables, reported


def read_users(tables: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `sequences` by user ID."""
    rows = read_rows(tables, "sequences")
    return {row["user_id"]: row for row in rows}


@dataclass(frozen=True)
class Prepared:
    """A prepared log and the lines reported meanwhile."""

    folder: Path
    tables: str
    reported: list[str]

    @property
    def info(self) -> dict[str, Any]:
        return read_manifest(self.tables + "/sequences").info


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Tables of a log of two files, with duplicates, bad actions, a constant action and
    a user without context.
    """
    folder = tmp_path_factory.mktemp("prepared")
    second_file = [
        LOG[3],
        "old,b,1600000000004,2,0,0,3",
        "old,b,1600000000005,0,0,0,7.5",
        "old,a,1600000000006,1,0,0,0.5",
    ]
    gzip_files = {"log_standard_2.csv.gz": second_file}
    tables, reported = prepare_log(folder, LOG, gzip_files=gzip_files)
    return Prepared(folder, tables, reported)


def test_constant_tasks_and_actions_are_dropped(prepared: Prepared) -> None:
    info = prepared.info
    assert info["tasks"] == ["liked", "click", "like"]
    assert info["actions"] == ["rating", "click", "like"]
    assert info["dropped"] == {
        "task never": "0 for all 4 training events",
        "action never": "0 for all 4 training events",
    }
    assert any(
        line.startswith("dropped: task never is 0 for all")
        for line in prepared.reported
    )


def test_sequences_have_tasks_features_and_split_boundaries(prepared: Prepared) -> None:
    info, users = prepared.info, read_users(prepared.tables)

    assert (users["old"]["train_end"], users["old"]["val_end"]) == (4, 5)
    assert (users["new"]["train_end"], users["new"]["val_end"]) == (0, 0)
    assert users["old"]["tasks"] == [
        [1, 1, 0],
        [0, 0, 0],
        [0, 1, 1],
        [0, 1, 0],
        [0, 0, 1],
        [1, 1, 0],
    ]
    assert info["base_rates"] == {"liked": 0.25, "click": 0.75, "like": 0.25}
    for name in ("features", "feature_mean", "feature_std"):
        assert len(info[name]) == 3 * 7
    assert info["requests"] == {"train": 4, "val": 1, "test": 3}
    assert info["users_with_candidates"] == {"train": 1, "val": 1, "test": 2}
    assert info["users_without_context"] == {"train": 1, "val": 0, "test": 1}


def prepare_viewers(folder: Path) -> str:
    """Prepare the log with an attribute of users and a category of events."""
    places = ["place", "home", "home", "", "shop", "shop", "home", "home"]
    lines = [f"{line},{place}" for line, place in zip(LOG, places, strict=True)]
    tables, _ = prepare_log(folder, lines, users=USERS, categories=["place"])
    return tables


def test_attributes_of_users_and_categories_of_events_are_features_of_events(
    tmp_path: Path,
) -> None:
    """The first row of a user counts; the vocabulary is that of training events."""
    tables = prepare_viewers(tmp_path)

    users = read_users(tables)
    assert users["old"]["cat_age"] == ["70"] * 5
    assert users["new"]["cat_age"] == ["20"] * 2
    assert users["old"]["cat_place"] == ["home", "home", None, "shop", "home"]
    viewers = read_manifest(tables + "/sequences").info["viewers"]
    assert viewers == {"place": ["home"], "age": ["70"]}
    assert not [rule.name for rule in audit(tables) if rule.violations]

    examples = load_split(ACTIONS, tables + "/sequences", "test")
    batch = examples.collate(np.arange(len(examples)))
    user_ids = list(users)
    candidate_viewers = {
        user_ids[int(user)]: batch.candidate_viewer[row][valid].tolist()
        for row, (user, valid) in enumerate(
            zip(batch.user_row, batch.candidate_valid, strict=True)
        )
    }
    # features in the order of their names: age, place
    assert candidate_viewers == {"old": [[1, 1]], "new": [[0, 0], [0, 1]]}
