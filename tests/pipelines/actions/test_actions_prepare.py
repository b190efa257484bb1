"""`prepare` from the raw files of a log of actions, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from models.actions.data import ActionsDataset
from models.storage.tables import UserError, read_manifest, read_table
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config, resolve_config

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
            "kind": "temporal",
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


def raw_log(
    folder: Path,
    lines: list[str],
    more: dict[str, list[str]] | None = None,
    **source: Any,
) -> tuple[Any, dict, str]:
    """A raw log of some files, and its source, with `source` besides, and the `prepare`
    section.
    """
    folder.mkdir()
    (folder / "log_standard_1.csv").write_text("\n".join(lines) + "\n")
    for name, content in (more or {}).items():
        (folder / name).write_bytes(
            gzip.compress(("\n".join([LOG[0], *content]) + "\n").encode())
        )
    (folder / "items.csv").write_text("i,a,s\na,x,1.5\nb,,\n")
    (folder / "users.csv").write_text("id,age\nold,70\nnew,20\nold,7\n")
    (folder / "source.yaml").write_text(yaml.safe_dump({**SOURCE, **source}))
    return *load_source(str(folder / "source.yaml")), str(folder)


def prepared(
    folder: Path,
    lines: list[str],
    *layers: dict,
    more: dict | None = None,
    **given: Any,
) -> tuple[str, list[str]]:
    """Tables of the log, and what was said."""
    source, defaults, raw = raw_log(folder / "raw", lines, more, **given)
    said: list[str] = []
    prepare(
        source,
        raw,
        str(folder / "tables"),
        read_config(defaults, *layers),
        report=said.append,
    )
    return str(folder / "tables"), said


def test_raw_files_to_tables(tmp_path: Path) -> None:
    """Several files, rows in both of them, bad actions, a constant action, a user
    without context.
    """
    more = {
        "log_standard_2.csv.gz": [
            LOG[3],
            "old,b,1600000000004,2,0,0,3",
            "old,b,1600000000005,0,0,0,7.5",
            "old,a,1600000000006,1,0,0,0.5",
        ]
    }
    tables, said = prepared(tmp_path, LOG, more=more)
    statistics = json.loads((tmp_path / "tables" / "statistics.json").read_text())
    info = read_manifest(tables + "/sequences").info

    assert statistics["raw"]["reject_reasons"] == {
        "click: not a bool, compare it, such as cast(click as double) > 0": 1,
        "rating: outside 0.5 to 5": 1,
    }
    assert statistics["raw"]["duplicates"] == 1
    assert (statistics["interactions"], statistics["sparsity"]) == (
        8,
        0,
    )  # both users have seen both items
    rejects = read_table(tables + "/rejects").to_pylist()
    assert sorted((row["file"], row["row"]) for row in rejects) == [
        ("log_standard_2.csv.gz", n) for n in (1, 2)
    ]

    assert info["tasks"] == ["liked", "click", "like"]
    assert info["actions"] == ["rating", "click", "like"]
    assert info["dropped"] == {
        "task never": "0 for all 4 training events",
        "action never": "0 for all 4 training events",
    }
    assert any(line.startswith("dropped: task never is 0 for all") for line in said)
    assert info["base_rates"] == {"liked": 0.25, "click": 0.75, "like": 0.25}
    assert (
        len(info["features"])
        == len(info["feature_mean"])
        == len(info["feature_std"])
        == 3 * 7
    )

    items = read_table(tables + "/items").to_pylist()
    assert [
        (row["item_id"], row["cat_author"], row["num_length"]) for row in items
    ] == [
        ("a", "x", 1.5),
        ("b", None, None),
    ]
    rows = {
        row["user_id"]: row for row in read_table(tables + "/sequences").to_pylist()
    }
    assert (rows["old"]["train_end"], rows["old"]["val_end"]) == (4, 5)
    assert (rows["new"]["train_end"], rows["new"]["val_end"]) == (0, 0)
    assert rows["old"]["tasks"] == [
        [1, 1, 0],
        [0, 0, 0],
        [0, 1, 1],
        [0, 1, 0],
        [0, 0, 1],
        [1, 1, 0],
    ]
    assert info["events"] == {"train": 4, "val": 1, "test": 3}
    assert info["users_with_candidates"] == {"train": 1, "val": 1, "test": 2}
    assert info["users_without_context"] == {"train": 1, "val": 0, "test": 1}
    assert info["events_without_context"]["test"] == 2
    again: list[str] = []
    source, defaults = load_source(str(tmp_path / "raw" / "source.yaml"))
    prepare(
        source,
        str(tmp_path / "raw"),
        tables,
        read_config(defaults),
        report=again.append,
    )
    assert again[0] == "note: no key of the mapping reads users.csv"
    assert [line.split(":")[0] for line in again[1:5]] == [
        "events",
        "rejects",
        "items",
        "sequences",
    ]
    assert all("up to date" in line for line in again[1:5])


def test_what_is_known_of_viewers_stands_at_their_events(tmp_path: Path) -> None:
    """Attributes of users and categories of events; the first row of a user counts,
    models know training's values.
    """
    places = ["home", "home", "", "shop", "shop", "home", "home"]
    lines = [
        f"{line},{place}" for line, place in zip(LOG, ["place", *places], strict=True)
    ]
    tables, _ = prepared(tmp_path, lines, users=USERS, categories=["place"])
    rows = {
        row["user_id"]: row for row in read_table(tables + "/sequences").to_pylist()
    }
    assert rows["old"]["cat_age"] == ["70"] * 5
    assert rows["new"]["cat_age"] == ["20"] * 2
    assert rows["old"]["cat_place"] == ["home", "home", None, "shop", "home"]
    assert read_manifest(tables + "/sequences").info["viewers"] == {
        "place": ["home"],
        "age": ["70"],
    }
    assert not [rule.name for rule in audit(tables) if rule.violations]
    examples = ActionsDataset.load(tables + "/sequences", "test")
    batch = examples.collate(np.arange(len(examples)))
    seen = {
        int(user): batch.candidate_viewer[row][there].tolist()
        for row, (user, there) in enumerate(
            zip(batch.user_row, batch.candidate_valid, strict=True)
        )
    }
    names = [row["user_id"] for row in read_table(tables + "/sequences").to_pylist()]
    assert {names[user]: values for user, values in seen.items()} == {
        "old": [[1, 1]],
        "new": [[0, 0], [0, 1]],
    }  # by name
    (tmp_path / "raw" / "users.csv").write_text("id,age\nold,71\n")
    source, defaults = load_source(str(tmp_path / "raw" / "source.yaml"))
    with pytest.raises(UserError, match="was made from other inputs"):
        prepare(
            source,
            str(tmp_path / "raw"),
            tables,
            read_config(defaults),
            report=lambda line: None,
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"users": {**USERS, "files": "nobody.csv"}}, "no user file like 'nobody.csv'"),
        ({"users": {**USERS, "attributes": {}}}, "users.attributes is empty"),
        ({"users": {**USERS, "atributes": {}}}, "nearest key is 'users.attributes'"),
        (
            {"users": USERS, "categories": {"age": "click"}},
            "'age' is the name of two features",
        ),
    ],
)
def test_user_files_that_do_not_fit_are_errors(
    tmp_path: Path, given: dict, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        resolve_config(
            *raw_log(tmp_path / "raw", LOG, **given)[::2],
            str(tmp_path / "tables"),
            read_config({"kind": "actions", "core": 0}),
        )


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (
            {"val_start": START + 1, "test_start": START + 30},
            "the log runs from 1600000000001 to 1600000000040 ms",
        ),
        (
            {"val_start": START + 20, "test_start": START + 41},
            "the log runs from 1600000000001 to 1600000000040 ms",
        ),
        (
            {"val_start": START + 26, "test_start": START + 30},
            r"leave no event in val \(train 4, val 0, test 3\)",
        ),
    ],
)
def test_a_cut_that_leaves_a_side_empty_is_an_error(
    tmp_path: Path, split: dict, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        prepared(tmp_path, LOG, {"split": split})
    assert not (tmp_path / "tables" / "sequences").exists()


def test_a_log_of_constant_actions_is_an_error(tmp_path: Path) -> None:
    constant = [
        LOG[0],
        *(",".join([*line.split(",")[:3], "1", "0", "0", "3"]) for line in LOG[1:]),
    ]
    with pytest.raises(UserError, match="every task is constant in training"):
        prepared(tmp_path, constant)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"split": {"kind": "leave_last_out"}}, "use temporal"),
        ({"core": 5}, "use --core 0"),
        ({"behaviour": "click"}, "every impression is a behaviour"),
        ({"ties": "log_order"}, "--ties strict"),
        ({"actions": {"tasks": {"t": {"label": "dwell"}}}}, "no label 'dwell'"),
        ({"actions": {"task": {}}}, "nearest key is 'prepare.actions.tasks'"),
        (
            {"split": {"val_start": "2022-05-07", "test_start": "2022-05-06"}},
            "swap them",
        ),
        ({"split": {"val_start": "soon", "test_start": "2022-05-06"}}, "give a moment"),
        ({"split": {"val_days": 1}}, "one of val_days and test_days"),
        (
            {"split": {"val_days": 1, "test_days": 1, "val_start": 1, "test_start": 2}},
            "both val_start and val_days",
        ),
    ],
)
def test_settings_that_do_not_fit_are_errors(
    tmp_path: Path, layer: dict, words: str
) -> None:
    source, defaults, raw = raw_log(tmp_path / "raw", LOG)
    with pytest.raises(UserError, match=words):
        resolve_config(
            source, raw, str(tmp_path / "tables"), read_config(defaults, layer)
        )


@pytest.mark.parametrize("kind", ["auto", "temporal", "leave_last_out"])
def test_a_log_without_a_clock_has_no_split_for_actions(
    tmp_path: Path, kind: str
) -> None:
    source, defaults, raw = raw_log(
        tmp_path / "raw", LOG, time={"column": "t", "unit": "order"}
    )
    defaults["split"] = {"kind": kind}
    with pytest.raises(
        UserError,
        match=r"a log of actions needs clock times.*; give time.unit s, ms, us or iso",
    ):
        resolve_config(source, raw, str(tmp_path / "tables"), read_config(defaults))


def test_an_item_number_that_is_none_is_a_reject(tmp_path: Path) -> None:
    source, _, raw = raw_log(tmp_path / "raw", LOG)
    (tmp_path / "raw" / "items.csv").write_text("i,a,s\na,x,long\nb,,2\n")
    [block] = source.items.read(raw, "items.csv")
    assert block.rows["item_id"].to_pylist() == ["b"]
    assert block.rejects["reason"][0].as_py().startswith("s: not a number; ")
    assert (block.rejects.num_rows, block.rows_read) == (1, 2)


def test_cut_times_are_dates_or_ms() -> None:
    for starts in (
        ("1970-01-02", "1970-01-03T00:00:00+00:00"),
        (86_400_000, str(2 * 86_400_000)),
    ):
        split = read_config(
            {"split": dict(zip(("val_start", "test_start"), starts, strict=True))}
        ).split
        assert (split.val_start, split.test_start) == (86_400_000, 2 * 86_400_000)
        assert split.settings()["val_start"] == 86_400_000
    with pytest.raises(UserError, match="give both"):
        read_config({"split": {"val_start": "1970-01-02"}})
    assert "val_start" not in PrepareConfig().split.settings()
