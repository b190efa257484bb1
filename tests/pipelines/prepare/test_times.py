"""Times in every unit and format are parsed as Python's datetime parses them."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from tests.fixtures.commands import prepare_log, read_rows, write_rows

FORMATS = [
    "%Y-%m-%d %H:%M:%S",
    "%d.%m.%Y %H:%M:%S.%f",
    "%Y-%m-%d %H:%M:%S,%f",
    "%Y%m%d",
    "%Y%m%d%H%M%S",
    "%m/%d/%Y %H:%M",
    "%d/%m/%y %H:%M",
    "%d %B %Y %I:%M %p",
    "%a %b %d %H:%M:%S %z %Y",
    "%d/%b/%Y:%H:%M:%S %z",
    "%Y-%m-%dT%H:%M:%S.%f%z",
    "%Y-%m-%d %H:%M:%S %Z",
    "%G-W%V-%u",
    "%j %Y %H",
    "%A, %d. %B %Y",
    "%c",
    "%x %X",
    "%%%Y-%m-%d",
    "%f %Y-%m-%d",
]
ISO_FORMATS = [
    "%Y%m%dT%H%M%S%z",
    "%G-W%V-%u",
    "%Y-%m-%d %H:%M:%S UTC",
    "%Y-%m-%dT%H:%MZ",
]
ZONES = ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]
UNITS = {"s": 1000, "ms": 1, "us": Fraction(1, 1000), "ns": Fraction(1, 10**6)}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = "%Y-%m-%d %H:%M:%S"


def to_ms(moment: datetime) -> int:
    """Return the milliseconds since 1970 of a moment, of UTC without a zone."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - EPOCH) // timedelta(milliseconds=1)


def parse_columns(
    folder: Path, columns: list[tuple[dict[str, Any], list[Any]]]
) -> list[list[int]]:
    """Return the milliseconds of columns of times, which are those of labels."""
    rows: list[dict[str, Any]] = []
    for number in range(len(columns[0][1])):
        row = {"u": "a", "i": "x", "t": f"1980-01-01 00:00:00.{number:03}"}
        for index, (_, values) in enumerate(columns):
            row[f"c{index}"] = values[number]
        rows.append(row)
    write_rows(folder / "log.csv", rows)
    labels = {
        f"l{c}": {"column": "1", "time": {"column": f"c{c}", **keys}}
        for c, (keys, _) in enumerate(columns)
    }
    mapping = {
        "files": "log.csv",
        "user": "u",
        "item": "i",
        "time": {"column": "t"},
        "labels": labels,
        "prepare": {"core": 0, "split": {"by": "leave_last_out"}},
    }
    prepare_log(mapping, folder, folder / "tables")
    events = read_rows(folder / "tables", "events")
    return [[row[f"known_{name}"] for row in events] for name in labels]


def test_times_are_parsed_as_python_parses_them(tmp_path):
    draw = random.Random(0)
    moments = [
        datetime(1980, 1, 4)
        + timedelta(microseconds=draw.randrange(43 * 365 * 86400 * 10**6))
        for _ in range(200)
    ]
    columns: list[tuple[dict[str, Any], list[Any]]] = []
    expected: list[list[int]] = []
    zones = [timezone(timedelta(minutes=draw.randrange(-720, 840))) for _ in moments]
    for format in FORMATS + ISO_FORMATS:
        has_zone = "%z" in format
        texts = [
            moment.replace(tzinfo=zone if has_zone else UTC).strftime(format)
            for moment, zone in zip(moments, zones, strict=True)
        ]
        columns.append(({} if format in ISO_FORMATS else {"format": format}, texts))
        parsed = format.replace("UTC", "%Z").replace("MZ", "M%z")
        expected.append([to_ms(datetime.strptime(text, parsed)) for text in texts])
    for zone in ZONES:
        texts = [moment.strftime(SECOND) for moment in moments]
        local = [datetime.strptime(text, SECOND) for text in texts]
        for keys in ({}, {"format": SECOND}):
            columns.append(({"zone": zone, **keys}, texts))
            expected.append([to_ms(t.replace(tzinfo=ZoneInfo(zone))) for t in local])
    for moment_format in (
        lambda moment: moment.isoformat(),
        lambda moment: moment.isoformat(" ").replace("+", " +"),
        lambda moment: moment.isoformat().replace(".", ","),
    ):
        aware = [m.replace(tzinfo=z) for m, z in zip(moments, zones, strict=True)]
        columns.append(({}, [moment_format(moment) for moment in aware]))
        expected.append([to_ms(moment) for moment in aware])
    for unit, scale in UNITS.items():
        values = [
            math.floor(to_ms(moment) / scale) + draw.randrange(1000)
            for moment in moments
        ]
        columns += [
            ({"unit": unit}, values),
            ({"unit": unit}, [f" {v} " for v in values]),
        ]
        expected += [[math.floor(value * scale) for value in values]] * 2
    seconds = [to_ms(moment) for moment in moments]
    columns.append(({"unit": "s"}, [repr(ms / 1000) for ms in seconds]))
    columns.append(
        ({"unit": "s"}, [f"{ms // 1000}.{ms % 1000:03}999" for ms in seconds])
    )
    columns.append(({"unit": "ms"}, [f"{ms}.9" for ms in seconds]))
    expected += [seconds] * 3

    results = parse_columns(tmp_path, columns)

    for (keys, texts), parsed, right in zip(columns, results, expected, strict=True):
        assert parsed == right, (keys, texts[0])


def test_the_hour_that_a_clock_change_repeats_or_skips(tmp_path):
    """The first of two equal hours is used; a skipped hour is read as Python does."""
    texts = ["2023-10-29 02:30:00", "2023-10-29 03:10:00", "2023-03-26 02:30:00"]
    texts.append("2023-01-01 01:00:00")
    expected = [
        to_ms(datetime(2023, 10, 29, 0, 30)),
        to_ms(datetime(2023, 10, 29, 2, 10)),
        to_ms(datetime(2023, 3, 26, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))),
        to_ms(datetime(2023, 1, 1)),
    ]
    formats = ({}, {"format": SECOND})
    columns = [({"zone": "Europe/Berlin", **keys}, texts) for keys in formats]

    assert parse_columns(tmp_path, columns) == [expected] * 2
