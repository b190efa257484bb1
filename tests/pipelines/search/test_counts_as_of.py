"""Counts as of a moment equal the counts that `prepare` writes for a search at that moment,
where the log ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.files import join
from core.schemas import SearchInfo
from core.tables import open_table, read_manifest
from models.search.counts import Counts
from tests.fixtures.commands import read_column, read_rows, read_table, run_job
from tests.fixtures.search_log import DAY_MS, draw_searches, prepare_searches

ITEMS = [f"i{n}" for n in range(15)] + ["never"]
PROBE_QUERIES = ("red", "blue", "red lamp", None, "never asked")


def make_probes(moment: int) -> list[dict[str, Any]]:
    """Make one search per query at `moment` that shows all items."""
    return [
        {
            "user": f"probe{n}",
            "search": f"probe{n}",
            "ms": moment,
            "query": query,
            "shown": ITEMS,
            "clicked": [],
            "bought": [],
        }
        for n, query in enumerate(PROBE_QUERIES)
    ]


def get_counted_pairs(rows: list[dict[str, Any]]) -> set[tuple[str | None, str | None]]:
    """Return the (item, query) keys with counts: pairs, items alone and queries alone."""
    pairs: set[tuple[str | None, str | None]] = set()
    for row in rows:
        for item in row["shown"]:
            pairs |= {(item, None), (item, row["query"]), (None, row["query"])}
    return pairs - {(None, None)}


def assert_counts_equal_probes(
    counts_uri: str, tables: str, probes: list[dict[str, Any]]
) -> None:
    """Assert that a table of counts gives the features of the probes in `tables`."""
    info = open_table(join(tables, "sequences"), SearchInfo).info
    names = info.features
    counts = Counts.load(counts_uri, info)
    is_count = np.array(
        [name.split("_")[0] in ("pair", "item", "query") for name in names]
    )
    assert is_count.sum() == len(names) - 6
    items = read_column(tables, "items", "item_id")
    sequences = read_rows(tables, "sequences")
    requests_by_user = {row["user_id"]: row["requests"] for row in sequences}
    for probe in probes:
        [request] = requests_by_user[probe["user"]]
        assert [items[i] for i in request["candidates"]] == ITEMS
        values = np.full((len(ITEMS), len(names)), np.nan, np.float32)
        counts.fill(values, ITEMS, [probe["query"]] * len(ITEMS))
        expected = np.reshape(request["features"], values.shape)
        np.testing.assert_array_equal(values[:, is_count], expected[:, is_count])
        assert np.isnan(values[:, ~is_count]).all()


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("partitions", "click_delay_minutes", "delay"),
    [(None, 0, 30), (3, 0, 0), (None, 600, 0)],
)
def test_counts_as_of_a_moment_equal_those_of_a_search_at_that_moment(
    tmp_path, partitions, click_delay_minutes, delay
):
    rows = draw_searches()
    times = sorted(row["ms"] for row in rows)
    labels = {"click": {"delay_minutes": click_delay_minutes}}
    changes = {"labels": labels} if click_delay_minutes else {}
    options: dict[str, Any] = {"search.delay_minutes": delay}
    if partitions:
        options["partitions"] = partitions
    # some searches are at the first and third moment itself
    moments = [times[60], times[60] + 1, times[90], times[-1] + 3 * DAY_MS]
    assert [moment in times for moment in moments] == [True, False, True, False]
    for number, moment in enumerate(moments[:1] if partitions else moments):
        whole = prepare_searches(
            tmp_path / f"whole-{number}",
            rows,
            changes,
            counts_as_of=moment,
            **options,
        )
        earlier = [row for row in rows if row["ms"] < moment]
        probes = make_probes(moment)
        ends_at_moment = prepare_searches(
            tmp_path / f"cut-{number}", earlier + probes, changes, **options
        )

        counts_uri = join(whole, "counts")
        assert read_manifest(counts_uri).info["as_of_ms"] == moment
        assert_counts_equal_probes(counts_uri, ends_at_moment, probes)
        table = read_table(counts_uri).to_pylist()
        assert sorted(str((row["item_id"], row["query"])) for row in table) == sorted(
            map(str, get_counted_pairs(earlier))
        )


def test_another_moment_replaces_the_counts_and_no_other_table(tmp_path, capsys):
    rows = draw_searches()
    first, second = rows[0]["ms"], rows[1]["ms"]

    tables = prepare_searches(tmp_path, rows)
    paths = {"input": tmp_path / "raw", "output": tables, "max_rejects": 0.2}
    table_hashes, count_hashes = [], []
    for moment in (None, first, second, second):
        if moment:
            run_job("prepare", source=f"{tables}.yaml", counts_as_of=moment, **paths)
        names = ("events", "items", "sequences")
        hashes = [read_manifest(join(tables, name)).hash for name in names]
        table_hashes.append(hashes)
        if moment:
            count_hashes.append(read_manifest(join(tables, "counts")).hash)

    assert table_hashes == [table_hashes[0]] * 4
    assert count_hashes[0] != count_hashes[1] == count_hashes[2]
    assert capsys.readouterr().out.count("counts: up to date, as of 2019-04-") == 1
