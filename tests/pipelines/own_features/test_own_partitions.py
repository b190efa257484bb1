"""Own features of a log in several partitions, made by Ray: the same as of one partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.tables import read_manifest, read_table
from tests.audited import broken
from tests.own_features_log import AS_OF, FEED, FEED_PREPARE, PREPARE, SOURCE, make, write_feed

PLANS = {"files": "plans.csv", "user": "user", "time": {"column": "at", "unit": "ms"}, "categories": ["plan"]}
SEARCH: dict[str, Any] = {**SOURCE, "as_of": {**AS_OF, "plans": PLANS}}


@pytest.mark.parametrize("kind", ["search", "actions"])
def test_partitions_change_nothing(raw: Path, tmp_path: Path, ray_local: None, kind: str) -> None:
    del ray_local
    write_feed(raw)
    plans = ["user,at,plan", *(f"u{user},{1_700_000_000_000 + user},p{user % 3}" for user in range(0, 250, 2))]
    (raw / "plans.csv").write_text("\n".join(plans) + "\n")
    source, of_kind = {"search": (SEARCH, PREPARE), "actions": (FEED, FEED_PREPARE)}[kind]
    own: dict[str, Any] = {"search": {"item_features": ["brand"]}} if kind == "search" else {}
    found = []
    for partitions in (None, 3):
        folder = tmp_path / f"in_{partitions}"
        tables = make(folder, raw, source, {"partitions": partitions, **own}, of_kind)
        manifest = read_manifest(f"{tables}/sequences")
        rows = sorted(read_table(f"{tables}/sequences").to_pylist(), key=lambda row: row["user_id"])
        found.append((rows, manifest.info))
        assert broken(tables) == {}
        assert len(manifest.files) == (partitions or 1)
    (one, info), (three, other) = found
    assert one == three
    for number, same in zip(info["own"]["numbers"], other["own"]["numbers"], strict=True):
        assert number["mean"] == pytest.approx(same["mean"])
        assert number["std"] == pytest.approx(same["std"])
    assert info["own"]["categories"] == other["own"]["categories"]
    assert info["as_of"] == other["as_of"]
    if kind == "search":
        assert {row["requests"][0]["cat_plan"][0] for row in one} == {None, "p0", "p1", "p2"}
