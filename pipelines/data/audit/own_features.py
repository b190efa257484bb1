"""Rules on own features that several kinds share: what the manifest says of them is what training rows say."""

from __future__ import annotations

from typing import Any

import polars as pl

from models.tables import join, read_manifest, read_parquet
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
    for name, said in (tables.sequences.info.get("as_of") or {}).items():
        manifest = read_manifest(join(tables.uri, name), name)
        parts = [read_parquet(join(tables.uri, name, part.path), None, part.sha256) for part in manifest.files]
        known = pl.concat([pl.DataFrame(pl.from_arrow(part)) for part in parts])
        known = known.rename({"timestamp_ms": "__since"}).sort("__since")
        at_times = rows.select("__row", said["key"], __at=at).sort("__at")
        found = at_times.join_asof(
            known,
            left_on="__at",
            right_on="__since",
            by=said["key"],
            strategy="backward",
            allow_exact_matches=False,
            check_sortedness=False,
        )
        rows = rows.join(found.select("__row", *said["features"]), on="__row", how="left", maintain_order="left")
    if of_items := tables.sequences.info.get("item_features"):
        items = pl.concat([part for _, part in tables.parts("items", ["item_id", *of_items])])
        rows = rows.join(items, on="item_id", how="left", maintain_order="left")
    return rows.drop("__row")


def check_as_of_inputs(tables: Tables, rule: Rule) -> None:
    """The tables with a time of their own are those that sequences were made from; an id has one row at a time."""
    for name, said in (tables.sequences.info.get("as_of") or {}).items():
        manifest = read_manifest(join(tables.uri, name), name)
        rule.rows += manifest.rows
        recorded = str(tables.sequences.inputs.get(name))
        if recorded != manifest.hash:
            rule.broken(1, [f"sequences were made from {name} {recorded[:12]}, this folder holds {manifest.hash[:12]}"])
        parts = [read_parquet(join(tables.uri, name, part.path), None, part.sha256) for part in manifest.files]
        keys = pl.concat([pl.DataFrame(pl.from_arrow(part)) for part in parts]).select(said["key"], "timestamp_ms")
        twice = keys.filter(keys.is_duplicated()).with_columns(of=pl.lit(name), id=pl.col(said["key"]))
        rule.broken_rows(twice, lambda row: f"{row['of']}: {row['id']} has several rows at {row['timestamp_ms']}")


class TrainingValues:
    """What training rows say of own features, part by part."""

    def __init__(self, info: dict[str, Any]) -> None:
        said = info.get("own") or {"numbers": [], "categories": []}
        self.numbers = {number["name"]: number for number in said["numbers"]}
        self.categories = {category["name"]: category for category in said["categories"]}
        self.sums = {name: [0, 0, 0.0, 0.0] for name in self.numbers}
        self.values: dict[str, set[str]] = {name: set() for name in self.categories}

    def add(self, train: pl.DataFrame) -> None:
        """Rows of training, a column per feature."""
        for name, said in self.numbers.items():
            apart = train[name].drop_nulls().cast(pl.Float64) - said["mean"]  # so that sums of squares lose nothing
            added = [train.height, len(apart), float(apart.sum()), float((apart**2).sum())]
            self.sums[name] = [a + b for a, b in zip(self.sums[name], added, strict=True)]
        for name, seen in self.values.items():
            seen |= set(train[name].drop_nulls().unique().to_list())

    def check(self, rule: Rule) -> None:
        """Reports what the manifest says otherwise."""
        rule.rows += len(self.numbers) + len(self.categories)
        for name, (rows, known, total, squares) in self.sums.items():
            said, count = self.numbers[name], max(1, known)
            mean = said["mean"] + total / count if known else 0.0
            std = max(0.0, squares / count - (total / count) ** 2) ** 0.5
            std = std if std > 1e-9 * max(1.0, abs(mean)) else 1.0
            right = {"mean": mean, "std": std, "missing": known < rows}
            wrong = [key for key, value in right.items() if abs(said[key] - value) > TOLERANCE * max(std, abs(value))]
            rule.broken(
                int(bool(wrong)),
                [f"{key} of {name}: the manifest says {said[key]}, training rows give {right[key]}" for key in wrong],
            )
        for name, seen in self.values.items():
            said = self.categories[name]
            if not said["buckets"] and said["values"] != sorted(seen):
                other = sorted(seen.symmetric_difference(said["values"]))[:SHOWN] or ["their order"]
                rule.broken(
                    1,
                    [
                        f"values of {name}: the manifest lists {len(said['values']):,}, training rows have "
                        f"{len(seen):,}; they differ in such as {', '.join(other)}"
                    ],
                )
