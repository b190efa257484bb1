"""Tables of benchmark rows: one per size and setting, its variants side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipelines.comparison.rows import Row, Run
from pipelines.comparison.table import Table

REFERENCES = ("hf", "tiger_shared_kv")
"""Variants that the speed of the others is compared with."""

HIDDEN_PARAMS = (
    "name",
    "seed",
    "k",
    "kernels",
    "mean_history",
    "histories",
    "sids",
    "checkpoints",
)
"""Params that are in no title."""


def to_rows(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Convert benchmark lines to rows of a comparison, averaging lines of one variant
    and setting.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    for place, line in enumerate(lines):
        name, params = (
            f"{line['benchmark']}/{line['variant']}",
            {f"model.{k}": str(v) for k, v in line["params"].items()},
        )
        experiment = f"benchmark/{line['benchmark']}"
        row = rows.setdefault(
            (name, *params.items()), Row(name, experiment=experiment, params=params)
        )
        figures = {
            key: float(value)
            for key, value in line.items()
            if isinstance(value, int | float)
        }
        row.runs.append(Run(str(place), line["variant"], "", True, "", "", figures))
    return list(rows.values())


def benchmark_tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table per setting: variants with time, rate, encoder, decoding and
    memory, slowest first.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(variant_settings(row), []).append(row)
    return [
        table(dict(key), group)
        for key, group in sorted(
            groups.items(), key=lambda item: sort_key(dict(item[0]))
        )
    ]


def variant_settings(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the row's params without the variant."""
    return tuple(sorted((k.removeprefix("model."), v) for k, v in row.params.items()))


def sort_key(params: dict[str, str]) -> tuple[object, ...]:
    """Return the sort key of a setting: trained models first, then by size."""
    sizes = [
        int(value) if (value := params.get(name, "")).isdigit() else 0
        for name in ("batch", "beam")
    ]
    return (params.get("checkpoints") in ("{}", None), *sizes, sorted(params.items()))


def table(params: dict[str, str], rows: list[Row]) -> Table:
    """Return the table of one setting."""
    rows = sorted(rows, key=lambda row: -row.mean("median_s"))
    variants = {row.model.split("/", 1)[1]: row for row in rows}
    apart = any(not math.isnan(row.mean("decode_s")) for row in rows)
    references = [name for name in REFERENCES if name in variants]
    header = ["variant", "ms", "min to max", "per s"]
    weighed = any(not math.isnan(row.mean("peak_memory_mb")) for row in rows)
    header += [
        *(["encoder, format_ms", "decoding, format_ms"] if apart else []),
        *(["peak MB"] if weighed else []),
    ]
    header += [f"x {name}" for name in references]
    header += [f"decoding alone, x {name}" for name in references] if apart else []
    cells = []
    for name, row in variants.items():
        line = [
            name,
            format_ms(row, "median_s"),
            f"{format_ms(row, 'min_s')} to {format_ms(row, 'max_s')}",
        ]
        line.append(format_number(row.mean("items_per_s")))
        line += (
            [format_ms(row, "encode_s"), format_ms(row, "decode_s")] if apart else []
        )
        line += [format_number(row.mean("peak_memory_mb"))] if weighed else []
        for part in ("median_s", "decode_s") if apart else ("median_s",):
            line += [
                format_speedup(variants[other].mean(part), row.mean(part))
                for other in references
            ]
        cells.append(line)
    trained = params.get("checkpoints", "{}") != "{}"
    hidden = (
        (*HIDDEN_PARAMS, "items") if trained else HIDDEN_PARAMS
    )  # a trained model has the catalogue of its tables
    title = ", ".join(
        f"{name} {value}"
        for name, value in params.items()
        if name not in hidden and value != "None"
    )
    notes = [f"medians of {format_number(rows[0].mean('runs'))} interleaved runs."]
    if "mean_history" in params:
        given = (
            "trained models, histories of test requests"
            if trained
            else "random weights and histories"
        )
        notes[0] += f" {given}, {params['mean_history']} items in the mean."
    return Table(
        f"{rows[0].model.split('/')[0]}: {title}", header, cells, notes, num_words=1
    )


def format_ms(row: Row, name: str) -> str:
    value = 1000 * row.mean(name)
    return "-" if math.isnan(value) else f"{value:,.1f}"


def format_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def format_speedup(reference: float, value: float) -> str:
    """Format how many format_speedup as fast as the reference a value is."""
    return "-" if math.isnan(reference / value) else f"{reference / value:,.2f}"
