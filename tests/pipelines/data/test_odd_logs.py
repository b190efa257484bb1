"""Unusual valid logs: ids of all characters, and a user with very many events."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from models.retrieval.data import RetrievalDataset
from models.storage.tables import read_manifest, read_table
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config

ODD = [
    'quo"te',
    "new\nline",
    "carriage\r\nreturn",
    "com,ma",
    "tab\there",
    "  blank  ends ",
    "NUL\x00inside",
    "'",
    "\\",
    "\\n",
    "ümläut",
    "日本",
    "🙂",
    "a" * 5000,
    "%s{}$HOME",
    "-1",
    "../up",
    "null-not",
    "0",
    "1e5",
]


def rows(number: int = 600) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {
            "user": ODD[draw.integers(len(ODD))] + "|u",
            "item": ODD[draw.integers(len(ODD))] + "|i",
            "ms": 1_600_000_000_000 + int(draw.integers(10**9)),
        }
        for _ in range(number)
    ]


def write(folder: Path, kind: str, log: list[dict[str, Any]]) -> str:
    """Write a log of a kind to a file, and return the path of its mapping."""
    folder.mkdir()
    if kind == "csv":
        with open(folder / "log.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["user", "item", "ms"], quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(log)
    elif kind == "jsonl":
        (folder / "log.jsonl").write_text("\n".join(json.dumps(row) for row in log))
    else:
        pl.DataFrame(log).write_parquet(folder / "log.parquet")
    rest = "user: user\nitem: item\ntime: {column: ms, unit: ms}\nprepare: {core: 0, split: {kind: temporal}}\n"
    mapping = folder / "source.yaml"
    mapping.write_text(f"files: log.{kind}\n{rest}")
    return str(mapping)


def made(mapping: str, output: Path, **options: Any) -> str:
    source, defaults = load_source(mapping)
    raw = str(Path(mapping).parent)
    prepare(
        source,
        raw,
        str(output),
        read_config(defaults, options),
        report=lambda line: None,
    )
    return str(output)


@pytest.mark.parametrize(
    ("kind", "partitions"),  # by the driver alone, and by Ray
    [
        ("csv", 0),
        ("jsonl", 0),
        ("parquet", 0),
        pytest.param("csv", 3, marks=pytest.mark.long),
    ],
)
def test_ids_of_any_characters_stay_what_they_are(
    tmp_path: Path, kind: str, partitions: int, request: pytest.FixtureRequest
) -> None:
    if partitions:
        request.getfixturevalue("ray_local")
    log, options = rows(), {"partitions": partitions} if partitions else {}
    tables = made(write(tmp_path / "raw", kind, log), tmp_path / "out", **options)
    names = read_table(f"{tables}/items")["item_id"].to_pylist()
    expected: dict[str, list[tuple[int, str]]] = {}
    for row in log:
        expected.setdefault(row["user"].strip(), []).append(
            (row["ms"], row["item"].strip())
        )  # blanks at the ends go
    assert read_manifest(f"{tables}/rejects").rows == 0
    found = {
        row["user_id"]: row for row in read_table(f"{tables}/sequences").to_pylist()
    }
    assert found.keys() == expected.keys()
    for user, row in found.items():
        have = sorted(
            zip(
                row["timestamp_ms"],
                (names[item] for item in row["item_index"]),
                strict=True,
            )
        )
        assert have == sorted(expected[user])
    assert not [rule.name for rule in audit(tables) if rule.violations]


@pytest.mark.long
def test_a_user_with_very_many_events(tmp_path: Path) -> None:
    draw, many = np.random.default_rng(0), 100_000
    few = 500
    frame = pl.DataFrame(
        {
            "user": ["all"] * many + [f"u{number % 50}" for number in range(few)],
            "item": (draw.integers(200, size=many + few)).astype(str),
            "ms": 1_600_000_000_000 + draw.permutation(many + few) * 1000,
        }
    )
    raw = tmp_path / "raw"
    mapping = write(raw, "parquet", rows(1))
    frame.write_parquet(raw / "log.parquet")
    tables = made(mapping, tmp_path / "out", max_events=many)
    table = {
        row["user_id"]: row for row in read_table(f"{tables}/sequences").to_pylist()
    }
    assert len(table) == 51
    long = table["all"]
    assert len(long["item_index"]) == len(long["requests"]) == many
    assert long["timestamp_ms"] == sorted(long["timestamp_ms"])
    examples = RetrievalDataset.load(f"{tables}/sequences", "train", max_history=20)
    batch = examples.collate(examples.sort_for_evaluation(examples.rows())[-64:])
    assert batch.history.shape == (64, 20)
    cut = made(
        mapping, tmp_path / "cut"
    )  # by default the latest events of a user stay, and a line says so
    statistics = json.loads(Path(cut, "statistics.json").read_text())
    assert (
        max(map(len, read_table(f"{cut}/sequences")["item_index"].to_pylist()))
        == statistics["max_length"]
        < many
    )
