"""Prepare notes that a log's histories are sorted by item id."""

import random

import pytest

from tests.fixtures.commands import run_job


@pytest.mark.parametrize("is_sorted", [True, False])
def test_histories_that_ascend_by_item_id_are_noted(tmp_path, capsys, is_sorted):
    draw, lines = random.Random(3), ["user,item"]
    for user in range(120):
        items = draw.sample(range(100, 200), 12)
        items = sorted(items) if is_sorted else items
        lines += [f"u{user},i{item}" for item in items]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    mapping = "files: log.csv\nuser: user\nitem: item\ntime: {unit: order}\n"
    (tmp_path / "log.yaml").write_text(mapping + "prepare: {core: 0}\n")
    tables = tmp_path / "tables"
    run_job("prepare", source=tmp_path / "log.yaml", input=tmp_path, output=tables)

    output = capsys.readouterr().out
    assert output.count("100% of adjacent behaviours") == is_sorted
