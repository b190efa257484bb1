"""Logs of public bug reports that only whole commands show, each answered as its truth.md says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from models.tables import read_table
from pipelines.data.audit.rules import audit
from pipelines.data.log import load_source
from pipelines.data.prepare import prepare
from pipelines.data.settings import read_config

pytestmark = pytest.mark.shared_data

CASES = Path(__file__).parents[3] / "../shared/cases"


def prepare_case(name: str, output: Path, **settings: Any) -> tuple[str, list[str]]:
    """Prepare the log of a case; return where the tables are and the printed lines."""
    source, prepared = load_source(str(CASES / name / "src.yaml"))
    lines: list[str] = []
    config = read_config(prepared, settings)
    log = str(CASES / name / "log")
    prepare(source, log, str(output), config, say=lines.append)
    return str(output), lines


def test_targets_among_ties_are_not_the_highest_ids(tmp_path: Path) -> None:
    tables, lines = prepare_case("d4_last_out_ties", tmp_path / "tables")

    log = pl.read_csv(CASES / "d4_last_out_ties/log/log.csv")
    items = read_table(f"{tables}/items", "items")["item_id"].to_pylist()
    places: Counter[int] = Counter()
    for row in read_table(f"{tables}/sequences", "sequences").to_pylist():
        (test,) = [each for each in row["requests"] if each["split"] == "test"]
        basket = log.filter(u=row["user_id"], t=test["timestamp_ms"] // 1000)["i"]
        places[sorted(basket).index(items[test["candidates"][0]])] += 1
    assert sum(places.values()) == 30
    assert min(places[place] for place in range(3)) >= 3
    assert any("30 of 30 test requests have the time" in line for line in lines)
    assert not any(rule.violations for rule in audit(tables))
