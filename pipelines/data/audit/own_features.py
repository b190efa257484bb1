"""Rules on own features that several kinds share: what the manifest says of them is what training rows say."""

from __future__ import annotations

from typing import Any

import polars as pl

from pipelines.data.audit.base import SHOWN, Rule, Tables

TOLERANCE = 1e-5


def own_columns(info: dict[str, Any]) -> list[str]:
    """The columns of own features that the manifest of sequences names."""
    said = info.get("own") or {}
    return [each["name"] for kind in ("numbers", "categories") for each in said.get(kind, ())]


def with_as_of(tables: Tables, rows: pl.DataFrame, at: str) -> pl.DataFrame:
    """`rows` with the features of each table with a time of its own: those of the latest row of their `item_id` or
    `user_id` whose time is strictly before `at`; and with those of items."""
    rows = rows.with_row_index("__row")
    for name, said in (tables.info.get("as_of") or {}).items():
        known = tables.read(name).rename({"timestamp_ms": "__since"})
        found = (
            rows.select("__row", said["key"], __at=at)
            .sort("__at")
            .join_asof(
                known.sort("__since"), left_on="__at", right_on="__since", by=said["key"],
                allow_exact_matches=False, check_sortedness=False,
            )
        )  # fmt: skip
        rows = rows.join(found.select("__row", *said["features"]), on="__row", how="left", maintain_order="left")
    if of_items := tables.info.get("item_features"):
        rows = rows.join(tables.items.select("item_id", *of_items), on="item_id", how="left", maintain_order="left")
    return rows.drop("__row")


def check_as_of(tables: Tables, rule: Rule) -> None:
    """In the tables with a time of their own an id has one row at a time."""
    for name, said in (tables.info.get("as_of") or {}).items():
        keys = tables.read(name).select(said["key"], "timestamp_ms")
        rule.rows += keys.height
        twice = keys.filter(keys.is_duplicated())
        rule.broken_rows(twice, f"{name}: {{{said['key']}}} has several rows at {{timestamp_ms}}")


def check_training(info: dict[str, Any], train: pl.DataFrame, rule: Rule) -> None:
    """The manifest says of own features what the rows of training do; `train` has a column per feature."""
    said = info.get("own") or {"numbers": [], "categories": []}
    for number in said["numbers"]:
        rule.rows += 1
        known = train[number["name"]].drop_nulls().cast(pl.Float64)
        mean, std = (float(known.mean()), float(known.std(ddof=0))) if len(known) else (0.0, 0.0)  # type: ignore[arg-type]
        std = std if std > 1e-9 * max(1.0, abs(mean)) else 1.0
        for key, value in {"mean": mean, "std": std, "missing": len(known) < train.height}.items():
            if abs(number[key] - value) > TOLERANCE * max(std, abs(value)):
                rule.broken(f"{key} of {number['name']}: the manifest says {number[key]}, training rows give {value}")
    for category in said["categories"]:
        rule.rows += 1
        seen = train[category["name"]].drop_nulls().unique().sort().to_list()
        if not category["buckets"] and category["values"] != seen:
            other = sorted(set(seen).symmetric_difference(category["values"]))[:SHOWN] or ["their order"]
            rule.broken(
                f"values of {category['name']}: the manifest lists {len(category['values']):,}, training rows have "
                f"{len(seen):,}; they differ in such as {', '.join(other)}"
            )
