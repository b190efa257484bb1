"""Own features of a log in several partitions, made by Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.storage.tables import read_manifest, read_table
from tests.fixtures.audited import broken
from tests.fixtures.custom_features_log import AS_OF, SOURCE, make

PLANS = {
    "files": "plans.csv",
    "user": "user",
    "time": {"column": "at", "unit": "ms"},
    "categories": ["plan"],
}
SEARCH: dict[str, Any] = {**SOURCE, "as_of": {**AS_OF, "plans": PLANS}}


def test_the_audit_proves_what_several_partitions_make(
    raw: Path, tmp_path: Path, ray_local: None
) -> None:
    plans = [
        "user,at,plan",
        *(
            f"u{user},{1_700_000_000_000 + user},p{user % 3}"
            for user in range(0, 250, 2)
        ),
    ]
    (raw / "plans.csv").write_text("\n".join(plans) + "\n")
    tables = make(
        tmp_path, raw, SEARCH, {"partitions": 3, "search": {"item_features": ["brand"]}}
    )
    assert broken(tables) == {}
    assert len(read_manifest(f"{tables}/sequences").files) == 3
    rows = read_table(f"{tables}/sequences").to_pylist()
    assert {row["requests"][0]["cat_plan"][0] for row in rows} == {
        None,
        "p0",
        "p1",
        "p2",
    }
