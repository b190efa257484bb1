"""The rule on windowed counts."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from pipelines.data.audit.base import Rule, Tables, count_before, label_of, name_event


def check_windows(tables: Tables, rule: Rule, progress: Callable[[str], None]) -> None:
    """Recounts every feature that `info["windowed"]` of events or sequences names.

    An entry is {"column", "key": [...], "window_ms", "delay_ms", "label"}; the value at time t is the
    number of events with the same key, and with the bool label true where one is named, in
    [t - window_ms, t - delay_ms). A key with the user in it is counted within the part, any other over
    all parts.
    """
    recorded = [*tables.events.info.get("windowed", []), *tables.sequences.info.get("windowed", [])]
    if not recorded:
        rule.note = "no windowed features"
    columns = {field["name"] for field in tables.events.schema}
    for feature in [f for i, f in enumerate(recorded) if f not in recorded[:i]]:
        if missing := {"column", "key", "window_ms", "delay_ms"} - feature.keys():
            rule.broken(1, [f"{feature}: the manifest does not say {', '.join(sorted(missing))}"])
            continue
        column, key, label = feature["column"], list(feature["key"]), feature.get("label")
        needed = list(dict.fromkeys(["user_id", "item_id", "timestamp_ms", *key, *label_of(label)]))
        absent = [name for name in [column, *needed] if name not in columns]
        if absent:
            rule.broken(1, [f"{column}: events have no column {absent[0]}"])
            continue
        for number, events in tables.parts("events", list(dict.fromkeys([*needed, column]))):
            progress(f"{column}, part {number + 1} of {len(tables.events.files)}")
            points = events.with_row_index("event")
            total = pl.Series("count", [0]).new_from_index(0, points.height)
            for other in [number] if "user_id" in key else range(len(tables.events.files)):
                marks = tables.part("events", other, needed)
                if label:
                    marks = marks.filter(pl.col(label).fill_null(False))
                total = total + _in_window(points, marks, key, int(feature["window_ms"]), int(feature["delay_ms"]))
            rule.rows += points.height
            wrong = points.with_columns(count=total).filter(
                pl.col(column).cast(pl.Float64).ne_missing(pl.col("count").cast(pl.Float64))
            )
            wrong = wrong.with_columns(said=pl.lit(column))
            rule.broken_rows(
                wrong,
                lambda row: (
                    f"{name_event(row)}: {row['said']} is {row[row['said']]}, events in its window: {row['count']}"
                ),
            )


def _in_window(points: pl.DataFrame, marks: pl.DataFrame, key: list[str], window: int, delay: int) -> pl.Series:
    """Marks of the same key in [t - window, t - delay), in the order of `points`."""
    before = []
    for shift in (delay, window):
        moved = points.select("event", *key, pl.col("timestamp_ms") - shift)
        before.append(count_before(moved, marks, key, "timestamp_ms").sort("event")["count"])
    return before[0] - before[1]
