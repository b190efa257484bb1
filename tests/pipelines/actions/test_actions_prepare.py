"""`prepare` of a log of actions: tasks, features and splits, and attributes of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.tables import read_manifest
from models.actions.requests import ACTIONS
from pipelines.prepare.audit.rules import audit
from tests.fixtures.commands import load_split, prepare_log, read_rows

START = 1_600_000_000_000
SOURCE = {
    "files": "log.csv",
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
    "old,a,1600000000006,1,0,0,0.5",
    "old,b,1600000000025,0,1,0,",
    "new,a,1600000000031,1,0,0,5",  # a user with candidates and no context
    "new,b,1600000000032,0,0,0,3",
    "old,a,1600000000040,1,0,0,4",
]


def prepare_feed(folder: Path, lines: list[str], **changes: Any) -> str:
    """Prepare a log with some keys of its mapping changed; return its tables."""
    folder.mkdir(exist_ok=True)
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "items.csv").write_text("i,a,s\na,x,1.5\nb,,\n")
    (folder / "users.csv").write_text("id,age\nold,70\nnew,20\nold,7\n")
    prepare_log(SOURCE | changes, folder, folder / "tables")
    return str(folder / "tables")


def read_users(tables: str) -> dict[str, dict[str, Any]]:
    """Return the rows of `sequences` by user ID."""
    rows = read_rows(tables, "sequences")
    return {row["user_id"]: row for row in rows}


def test_sequences_have_tasks_features_and_split_boundaries(tmp_path, capsys):
    tables = prepare_feed(tmp_path, LOG)

    info, users = read_manifest(f"{tables}/sequences").info, read_users(tables)
    assert info["tasks"] == ["liked", "click", "like"]
    assert info["actions"] == ["rating", "click", "like"]
    assert info["dropped"].keys() == {"task never", "action never"}
    assert "task never is 0 for all 4 training events" in capsys.readouterr().out
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
    ratings = [actions[0] for actions in users["old"]["actions"]]
    assert ratings == pytest.approx([8 / 9, 1 / 9, 1 / 3, 0, 0, 7 / 9])  # of the range
    assert info["base_rates"] == {"liked": 0.25, "click": 0.75, "like": 0.25}
    for name in ("features", "feature_mean", "feature_std"):
        assert len(info[name]) == 3 * 7
    assert info["requests"] == {"train": 4, "val": 1, "test": 3}
    assert info["users_with_candidates"] == {"train": 1, "val": 1, "test": 2}
    assert info["users_without_context"] == {"train": 1, "val": 0, "test": 1}


def test_attributes_of_users_and_categories_of_events_are_features_of_events(tmp_path):
    """The first row of a user counts; the vocabulary is that of training events."""
    places = ["place", "home", "home", "", "home", "shop", "shop", "home", "home"]
    lines = [f"{line},{place}" for line, place in zip(LOG, places, strict=True)]
    tables = prepare_feed(tmp_path, lines, users=USERS, categories=["place"])

    users = read_users(tables)
    assert users["old"]["cat_age"] == ["70"] * 6
    assert users["new"]["cat_age"] == ["20"] * 2
    assert users["old"]["cat_place"] == ["home", "home", None, "home", "shop", "home"]
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


def test_counts_of_candidates_include_no_event_of_their_split(tmp_path):
    """Counts of candidates are taken at the start of the split: else one like of a user
    would lower the predictions of the user's other candidates.
    """

    def compute_features(disliked: int) -> np.ndarray:
        """Return the features (9, F) of a user who likes all items but one."""
        lines = [*LOG[:5]]
        for time in (11, 12, 13, 21, 22, 23, 31, 32, 33):
            lines.append(f"u,a,{START + time},1,{int(time != disliked)},0,4")
        tables = prepare_feed(tmp_path / str(disliked), lines)
        return np.array(read_users(tables)["u"]["features"])

    train_changed, val_changed, test_changed = map(compute_features, (11, 21, 31))

    assert np.array_equal(val_changed[3:6], np.tile(val_changed[3], (3, 1)))
    assert np.array_equal(test_changed[6:], np.tile(test_changed[6], (3, 1)))
    # events of validation are counted at the start of test
    assert not np.array_equal(val_changed[6:], test_changed[6:])
    assert not np.array_equal(train_changed[3:6], val_changed[3:6])
