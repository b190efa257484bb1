"""Counts as of a moment: those that `prepare` writes for a search then, of a log that
ends there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from models.search.counts import Counts
from models.storage.tables import UserError, join, read_manifest, read_table
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config
from tests.pipelines.search.test_search_sequences import DAY, searches, write_log

ITEMS = [f"i{n}" for n in range(15)] + ["never"]
ASKED = ("red", "blue", "red lamp", None, "never asked")


def made(
    folder: Path,
    rows: list[dict[str, Any]],
    partitions: int | None,
    late: float,
    **changes: Any,
) -> tuple[str, Any]:
    """TABLES of a raw log, and its settings; a click is known `late` minutes after it."""
    folder.mkdir()
    _, _, raw = write_log(folder, rows, partitions)
    content = yaml.safe_load((folder / "source.yaml").read_text())
    content["labels"]["click"] |= {"delay_minutes": late} if late else {}
    (folder / "source.yaml").write_text(yaml.safe_dump(content))
    source, defaults = load_source(str(folder / "source.yaml"))
    config = read_config(
        defaults, {"partitions": partitions, "max_rejects": 0.2, **changes}
    )
    prepare(source, raw, str(folder / "out"), config, report=lambda line: None)
    return str(folder / "out"), config


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("partitions", "late", "delay"), [(None, 0, 30), (3, 0, 0), (None, 600, 0)]
)
def test_they_are_those_of_a_search_at_that_moment(
    tmp_path: Path, partitions: int | None, late: float, delay: float
) -> None:
    rows = searches()
    times = sorted(row["ms"] for row in rows)
    settings = {"search": {"delay_minutes": delay}}
    moments = (times[60], times[60] + 1, times[90], times[-1] + 3 * DAY)
    for number, moment in enumerate(moments[:1] if partitions else moments):
        assert (moment in times) == (
            number in (0, 2)
        )  # so that some searches are at the moment itself
        out, _ = made(
            tmp_path / f"whole-{number}",
            rows,
            partitions,
            late,
            counts_as_of=str(moment),
            **settings,
        )
        probes = [
            {
                "user": f"probe{n}",
                "search": f"probe{n}",
                "ms": moment,
                "query": query,
                "shown": ITEMS,
                "clicked": [],
                "bought": [],
            }
            for n, query in enumerate(ASKED)
        ]
        before = [row for row in rows if row["ms"] < moment]
        cut, _ = made(
            tmp_path / f"cut-{number}", [*before, *probes], partitions, late, **settings
        )
        info = read_manifest(join(cut, "sequences")).info
        counts = Counts.load(join(out, "counts"), info["features"], info)
        assert read_manifest(join(out, "counts"), "counts").info["as_of_ms"] == moment
        items = read_table(join(cut, "items"))["item_id"].to_pylist()
        counted = [
            n
            for n, name in enumerate(info["features"])
            if name.split("_")[0] in ("pair", "item", "query")
        ]
        assert len(counted) == len(info["features"]) - 6
        found = {
            row["user_id"]: row
            for row in read_table(join(cut, "sequences")).to_pylist()
        }
        for probe in probes:
            (request,) = found[probe["user"]]["requests"]
            assert [items[i] for i in request["candidates"]] == ITEMS
            values = np.full((len(ITEMS), len(info["features"])), np.nan, np.float32)
            counts.fill(values, ITEMS, probe["query"])
            wanted = np.reshape(request["features"], values.shape)
            np.testing.assert_array_equal(values[:, counted], wanted[:, counted])
            assert np.isnan(np.delete(values, counted, 1)).all()
        table = read_table(join(out, "counts")).to_pylist()
        shown = [(item, row["query"]) for row in before for item in row["shown"]]
        there = {
            pair
            for item, query in shown
            for pair in ((item, None), (item, query), (None, query))
        } - {(None, None)}
        assert sorted(map(str, there)) == sorted(
            str((row["item_id"], row["query"])) for row in table
        )


def test_another_moment_replaces_them_and_nothing_else(tmp_path: Path) -> None:
    rows, said = searches(), []
    source, config, raw = write_log(tmp_path, rows, None)
    out, moments = str(tmp_path / "out"), [row["ms"] for row in rows[:2]]
    hashes = []
    for moment in (None, *moments, moments[1]):
        config.counts_as_of = moment
        prepare(source, raw, out, config, report=said.append)
        names = ("events", "items", "sequences", *(["counts"] if moment else []))
        hashes.append([read_manifest(join(out, name)).hash for name in names])
    assert [each[:3] for each in hashes] == [hashes[0]] * 4
    assert hashes[1][3] != hashes[2][3] == hashes[3][3]
    assert [line[:34] for line in said if line.startswith("counts: up")] == [
        "counts: up to date, as of 2019-04-"
    ]
    info = read_manifest(join(out, "sequences")).info
    assert Counts.load(join(out, "counts"), info["features"], info)
    for name, value in (("delay_minutes", 5.0), ("windows_days", [1.0])):
        other = {**info, "search": {**info["search"], name: value}}
        with pytest.raises(
            UserError,
            match=f"was counted with {name} .*; prepare the log with the model's source file",
        ):
            Counts.load(join(out, "counts"), info["features"], other)
    config.counts_as_of = min(row["ms"] for row in rows)
    with pytest.raises(
        UserError,
        match=r"counts_as_of is 2019-\S+Z, and the log has no event before it",
    ):
        prepare(source, raw, out, config, report=said.append)


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    def attempt(**changes: Any) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        source, config, raw = write_log(
            folder, searches(5), **{"counts_as_of": "2020-01-01", **changes}
        )
        prepare(
            source,
            raw,
            str(folder / "out"),
            config,
            report=pytest.fail,
            start=lambda: pytest.fail("started"),
        )

    with pytest.raises(
        UserError,
        match=r"^counts_as_of is 'noon'; give a moment such as 2022-05-07 or epoch ms$",
    ):
        attempt(counts_as_of="noon")
    with pytest.raises(
        UserError,
        match=r"^counts_as_of is 1700000000 ms, outside of the years 1980 to 2099; use a",
    ):
        attempt(counts_as_of=1_700_000_000)
    with pytest.raises(
        UserError,
        match=r"^counts_as_of is set, which only kind search supports; remove it for kind retr",
    ):
        attempt(kind="retrieval")
    with pytest.raises(UserError, match=r"^counts_as_of is set, but a log without"):
        attempt(search={"windows_days": []})
