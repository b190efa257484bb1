"""Unusual but valid logs: ids of any characters, and a user with 100,000 events."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from models.retrieval.data import RetrievalDataset
from models.storage.tables import read_manifest, read_table
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config
from tests.fixtures.audited_tables import find_violations

Row = dict[str, Any]

UNUSUAL_TEXTS = [
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


def draw_rows(count: int = 600) -> list[Row]:
    """Draw rows whose users and items have unusual ids."""
    rng = np.random.default_rng(0)
    return [
        {
            "user": UNUSUAL_TEXTS[rng.integers(len(UNUSUAL_TEXTS))] + "|u",
            "item": UNUSUAL_TEXTS[rng.integers(len(UNUSUAL_TEXTS))] + "|i",
            "ms": 1_600_000_000_000 + int(rng.integers(10**9)),
        }
        for _ in range(count)
    ]


def write_log(folder: Path, suffix: str, log: list[Row]) -> str:
    """Write a log in the format of a suffix, and return the path of its mapping."""
    folder.mkdir()
    if suffix == "csv":
        with open(folder / "log.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["user", "item", "ms"], quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(log)
    elif suffix == "jsonl":
        (folder / "log.jsonl").write_text("\n".join(json.dumps(row) for row in log))
    else:
        pl.DataFrame(log).write_parquet(folder / "log.parquet")
    mapping = folder / "source.yaml"
    mapping.write_text(
        f"files: log.{suffix}\n"
        "user: user\n"
        "item: item\n"
        "time: {column: ms, unit: ms}\n"
        "prepare: {core: 0, split: {kind: temporal}}\n"
    )
    return str(mapping)


def prepare_tables(mapping: str, output: Path, **options: Any) -> str:
    """Prepare the log beside a mapping and return the path of its tables."""
    source, defaults = load_source(mapping)
    raw, config = str(Path(mapping).parent), read_config(defaults, options)
    prepare(source, raw, str(output), config, report=lambda line: None)
    return str(output)


def read_sequences(tables: str) -> dict[str, Row]:
    """Return the row of sequences of each user."""
    rows = read_table(f"{tables}/sequences").to_pylist()
    return {row["user_id"]: row for row in rows}


@pytest.mark.parametrize(
    ("suffix", "partitions"),  # 0: by the driver alone
    [
        ("csv", 0),
        ("jsonl", 0),
        ("parquet", 0),
        pytest.param("csv", 3, marks=pytest.mark.long),
    ],
)
def test_ids_of_any_characters_are_kept_but_for_blanks_at_their_ends(
    tmp_path: Path, suffix: str, partitions: int, request: pytest.FixtureRequest
) -> None:
    options = {}
    if partitions:
        request.getfixturevalue("ray_local")
        options["partitions"] = partitions
    log = draw_rows()
    mapping = write_log(tmp_path / "raw", suffix, log)

    tables = prepare_tables(mapping, tmp_path / "out", **options)

    assert read_manifest(f"{tables}/rejects").rows == 0
    ids = read_table(f"{tables}/items")["item_id"].to_pylist()
    behaviours: Counter[tuple[str, str, int]] = Counter()
    for user, row in read_sequences(tables).items():
        for item, time in zip(row["item_index"], row["timestamp_ms"], strict=True):
            behaviours[user, ids[item], time] += 1
    assert behaviours == Counter(
        (row["user"].strip(), row["item"].strip(), row["ms"]) for row in log
    )
    assert find_violations(tables) == {}


NUM_EVENTS = 100_000


@pytest.fixture(scope="module")
def mapping_of_long_log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the mapping of a log with a user of 100,000 events, and 50 others."""
    rng, others = np.random.default_rng(0), 500
    log = pl.DataFrame(
        {
            "user": ["all"] * NUM_EVENTS + [f"u{n % 50}" for n in range(others)],
            "item": rng.integers(200, size=NUM_EVENTS + others).astype(str),
            "ms": 1_600_000_000_000 + rng.permutation(NUM_EVENTS + others) * 1000,
        }
    )
    raw = tmp_path_factory.mktemp("long") / "raw"
    mapping = write_log(raw, "parquet", draw_rows(1))
    log.write_parquet(raw / "log.parquet")
    return mapping


@pytest.mark.long
def test_a_user_with_100000_events_is_prepared_and_batched(
    tmp_path: Path, mapping_of_long_log: str
) -> None:
    tables = prepare_tables(mapping_of_long_log, tmp_path, max_events=NUM_EVENTS)

    sequences = read_sequences(tables)
    assert len(sequences) == 51
    row = sequences["all"]
    assert len(row["item_index"]) == len(row["requests"]) == NUM_EVENTS
    assert row["timestamp_ms"] == sorted(row["timestamp_ms"])
    examples = RetrievalDataset.load(f"{tables}/sequences", "train", max_history=20)
    batch = examples.collate(examples.sort_for_evaluation(examples.rows())[-64:])
    assert batch.history.shape == (64, 20)


@pytest.mark.long
def test_the_default_max_events_truncates_a_very_long_user(
    tmp_path: Path, mapping_of_long_log: str
) -> None:
    tables = prepare_tables(mapping_of_long_log, tmp_path)

    statistics = json.loads(Path(tables, "statistics.json").read_text())
    lengths = [len(row["item_index"]) for row in read_sequences(tables).values()]
    assert max(lengths) == statistics["max_length"] < NUM_EVENTS
