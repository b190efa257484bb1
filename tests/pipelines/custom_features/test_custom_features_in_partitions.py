"""Custom features of a log that Ray prepares in several partitions."""

from __future__ import annotations

from typing import Any

from core.tables import read_manifest
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.commands import read_rows
from tests.fixtures.custom_features_log import AS_OF, SOURCE, prepare_tables

PLANS = {
    "files": "plans.csv",
    "user": "user",
    "time": {"column": "at", "unit": "ms"},
    "categories": ["plan"],
}
WITH_PLANS: dict[str, Any] = {**SOURCE, "as_of": {**AS_OF, "plans": PLANS}}


def test_tables_of_several_partitions_have_the_features_of_items_and_users(
    raw, tmp_path, ray_local
):
    plans = [
        f"u{user},{1_700_000_000_000 + user},p{user % 3}\n" for user in range(0, 250, 2)
    ]
    (raw / "plans.csv").write_text("user,at,plan\n" + "".join(plans))
    settings = {"partitions": 3, "search": {"item_features": ["brand"]}}

    tables = prepare_tables(tmp_path, raw, WITH_PLANS, settings)

    assert find_violations(tables) == {}
    assert len(read_manifest(f"{tables}/sequences").files) == 3
    rows = read_rows(tables, "sequences")
    plans_of_users = {row["requests"][0]["cat_plan"][0] for row in rows}
    assert plans_of_users == {None, "p0", "p1", "p2"}
