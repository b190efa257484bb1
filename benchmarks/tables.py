"""Format the JSON lines of a benchmark as tables, one per size and setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipelines.comparison.rows import Row, Run
from pipelines.comparison.table import Table

REFERENCES = ("hf", "tiger_shared_kv")
"""Variants to which the speed of the others is compared."""

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
"""Params that titles of tables leave out."""


def to_rows(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Convert JSON lines to rows of a comparison, one per variant and settings."""
    rows: dict[tuple[Any, ...], Row] = {}
    for index, line in enumerate(lines):
        name = f"{line['benchmark']}/{line['variant']}"
        params = {f"model.{key}": str(value) for key, value in line["params"].items()}
        experiment = f"benchmark/{line['benchmark']}"
        row = rows.setdefault(
            (name, *params.items()), Row(name, experiment=experiment, params=params)
        )
        metrics = {
            key: float(value)
            for key, value in line.items()
            if isinstance(value, int | float)
        }
        row.runs.append(Run(str(index), line["variant"], "", True, "", "", metrics))
    return list(rows.values())


def benchmark_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table per setting with its variants, slowest first."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(list_settings(row), []).append(row)
    settings = sorted(groups, key=lambda setting: sort_key(dict(setting)))
    return [make_table(dict(setting), groups[setting]) for setting in settings]


def list_settings(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the sorted params of a row, which all variants of a setting share."""
    params = {name.removeprefix("model."): value for name, value in row.params.items()}
    return tuple(sorted(params.items()))


def sort_key(params: dict[str, str]) -> tuple[object, ...]:
    """Return a sort key of settings: trained models first, then by size."""
    values = [params.get(name, "") for name in ("batch", "beam")]
    sizes = [int(value) if value.isdigit() else 0 for value in values]
    is_random = params.get("checkpoints") in ("{}", None)
    return (is_random, *sizes, sorted(params.items()))


def make_table(params: dict[str, str], rows: list[Row]) -> Table:
    """Return the table of one setting.

    Args:
        params: Settings that all rows share.
        rows: One row per variant.
    """
    rows = sorted(rows, key=lambda row: -row.mean("median_s"))
    variants = {row.model.split("/", 1)[1]: row for row in rows}
    has_parts = any(not math.isnan(row.mean("decode_s")) for row in rows)
    has_memory = any(not math.isnan(row.mean("peak_memory_mb")) for row in rows)
    references = [name for name in REFERENCES if name in variants]
    header = ["variant", "ms", "min to max", "per s"]
    header += ["encoder, ms", "decoding, ms"] if has_parts else []
    header += ["peak MB"] if has_memory else []
    header += [f"x {name}" for name in references]
    if has_parts:
        header += [f"decoding alone, x {name}" for name in references]
    cells = []
    for name, row in variants.items():
        span = f"{format_ms(row, 'min_s')} to {format_ms(row, 'max_s')}"
        line = [name, format_ms(row, "median_s"), span]
        line.append(format_number(row.mean("items_per_s")))
        if has_parts:
            line += [format_ms(row, "encode_s"), format_ms(row, "decode_s")]
        if has_memory:
            line.append(format_number(row.mean("peak_memory_mb")))
        for part in ("median_s", "decode_s") if has_parts else ("median_s",):
            line += [
                format_speedup(variants[other].mean(part), row.mean(part))
                for other in references
            ]
        cells.append(line)
    title = f"{rows[0].model.split('/')[0]}: {_describe(params)}"
    return Table(title, header, cells, [_note(params, rows[0])], num_words=1)


def _is_trained(params: dict[str, str]) -> bool:
    return params.get("checkpoints", "{}") != "{}"


def _describe(params: dict[str, str]) -> str:
    """Return the params of a title."""
    # trained models have the catalogue of their tables
    hidden = (*HIDDEN_PARAMS, "items") if _is_trained(params) else HIDDEN_PARAMS
    return ", ".join(
        f"{name} {value}"
        for name, value in params.items()
        if name not in hidden and value != "None"
    )


def _note(params: dict[str, str], row: Row) -> str:
    """Return the note on the runs and the histories of a table."""
    note = f"medians of {format_number(row.mean('runs'))} interleaved runs."
    if "mean_history" not in params:
        return note
    source = "random weights and histories"
    if _is_trained(params):
        source = "trained models, histories of test requests"
    return f"{note} {source}, {params['mean_history']} items in the mean."


def format_ms(row: Row, name: str) -> str:
    """Format the mean of a metric in seconds as milliseconds."""
    value = 1000 * row.mean(name)
    return "-" if math.isnan(value) else f"{value:,.1f}"


def format_number(value: float) -> str:
    """Format a number without decimals; `-` for NaN."""
    return "-" if math.isnan(value) else f"{value:,.0f}"


def format_speedup(reference: float, value: float) -> str:
    """Format how many times as fast as the reference a variant is."""
    return "-" if math.isnan(reference / value) else f"{reference / value:,.2f}"
