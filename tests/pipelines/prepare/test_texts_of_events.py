"""`items: {from: events}` gives an item its latest text of the training window."""

from __future__ import annotations

import random

from core.tables import read_manifest
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import LOG, prepare_log, read_column, read_rows, write_rows

MAPPING = LOG | {
    "items": {"from": "events", "texts": {"title": "name", "note": "note"}}
}


def draw_rows(seed: int, begin: int) -> list[Row]:
    """Draw rows whose items change their texts, or have none."""
    generator = random.Random(seed)
    return [
        {
            "user": f"u{generator.randrange(40)}",
            "item": f"i{generator.randrange(30)}",
            "ms": 1_600_000_000_000 + begin + generator.randrange(200) * 1000,
            "name": generator.choice([None, "", "tea", f" cup {generator.random()}"]),
            "note": generator.choice([None, "x"]) if begin else None,
        }
        for _ in range(400)
    ]


def test_an_item_has_its_latest_text_before_validation(tmp_path):
    rows: list[Row] = []
    for piece in range(2):
        rows += draw_rows(piece, piece * 100_000)
        write_rows(tmp_path / f"log{piece}.jsonl", rows[-400:])
        prepare_log(MAPPING, tmp_path, tmp_path / "tables", append=True)
    whole = tmp_path / "whole"
    prepare_log(MAPPING, tmp_path, whole)

    val_start = read_manifest(f"{whole}/items").info["split"]["val_start_ms"]
    expected: dict[str, dict[str, str]] = {"name": {}, "note": {}}
    for row in sorted(rows, key=lambda row: (row["ms"], (row["name"] or "").strip())):
        for name, texts in expected.items():
            text = (row[name] or "").strip()
            if row["ms"] < val_start and text:
                texts[row["item"]] = text
    for tables in (tmp_path / "tables", whole):
        assert find_violations(str(tables)) == {}
        for item in read_rows(tables, "items"):
            assert item["text_title"] == expected["name"].get(item["item_id"])
            assert item["text_note"] == expected["note"].get(item["item_id"])
    assert len({*read_column(whole, "items", "text_title")}) > 10

    copied = copy_with_change(
        str(whole),
        tmp_path / "copy",
        lambda items, info: items[3].update(text_title="later"),
        "items",
    )
    assert list(find_violations(copied)) == ["texts"]
